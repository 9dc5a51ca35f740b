// Draws a dashboard with Grafana's own panels (@grafana/ui), from the answers of Prometheus.
//
// window.drawing is {dashboard, answers, from, to, mode}: answers has, by panel id, a list of {legend, labels,
// times, values}; for a table {columns: [{name, text, values}]}. Times are in milliseconds.
import React from "react";
import { createRoot } from "react-dom/client";
import { createTheme, dateTime, FieldType, getDisplayProcessor, getFieldDisplayValues, ThemeContext, toDataFrame } from "@grafana/data";
import { BarGauge, BigValue, GlobalStyles, Table, TimeSeries, VizRepeater } from "@grafana/ui";

const COLUMN = 64;
const ROW = 30;
const GAP = 8;
const HEAD = 30;
const { dashboard, answers, from, to, mode } = window.drawing;
const theme = createTheme({ colors: { mode } });
const timeRange = { from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } };

function framesOf(panel) {
  const answer = answers[panel.id] ?? [];
  const frames = answer.columns
    ? [toDataFrame({ fields: answer.columns.map((column) => ({
        name: column.name, type: column.text ? FieldType.string : FieldType.number, values: column.values, config: {},
      })) })]
    : answer.map((series) => toDataFrame({ fields: [
        { name: "Time", type: FieldType.time, values: series.times, config: {} },
        // Not "Value": the chart takes the first colour from this name, the legend from the one below.
        { name: series.legend || panel.title, type: FieldType.number, values: series.values, labels: series.labels,
          config: { displayNameFromDS: series.legend || panel.title } },
      ] }));
  const values = frames.flatMap((frame) => frame.fields.filter(({ type }) => type === FieldType.number))
    .flatMap((field) => field.values).filter((value) => value !== null);
  const highest = Math.max(...values);
  frames.forEach((frame, index) => frame.fields.forEach((field) => {
    if (field.type !== FieldType.time) configure(panel, field, index, highest);
  }));
  return frames;
}

// The server's part of Grafana would do this: it gives each field the panel's settings and those for its name.
function configure(panel, field, index, highest) {
  const { defaults, overrides } = panel.fieldConfig;
  const config = { ...defaults, ...field.config, custom: { ...defaults.custom } };
  for (const { matcher, properties } of overrides ?? []) {
    if (matcher.options !== field.name) continue;
    for (const { id, value } of properties) {
      if (id.startsWith("custom.")) config.custom[id.slice(7)] = value;
      else if (id !== "links") config[id] = value;
    }
  }
  if (panel.type === "bargauge") config.max ??= highest;
  field.config = config;
  field.state = { seriesIndex: index, scopedVars: {}, displayName: config.displayNameFromDS ?? field.name };
  field.display = getDisplayProcessor({ field, theme, timeZone: "utc" });
}

function Values({ panel, width, height, frames }) {
  const values = getFieldDisplayValues({
    data: frames, fieldConfig: panel.fieldConfig, replaceVariables: (text) => text, theme, timeZone: "utc",
    reduceOptions: panel.options.reduceOptions,
  });
  if (panel.type === "bargauge") {
    return <VizRepeater source={frames} getValues={() => values} width={width} height={height} orientation="horizontal"
      itemSpacing={6} maxVizHeight={34} minVizHeight={16} renderValue={({ value, width, height }) =>
        <BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          width={width} height={height} orientation="horizontal" theme={theme} displayMode={panel.options.displayMode}
          itemSpacing={6} lcdCellWidth={12} />} />;
  }
  return <VizRepeater source={frames} getValues={() => values} width={width} height={height} orientation="auto"
    renderValue={({ value, width, height, count }) =>
      <BigValue value={value.display} width={width} height={height} theme={theme} count={count}
        colorMode={panel.options.colorMode} graphMode="none" justifyMode="auto" textMode={panel.options.textMode} />} />;
}

function Content({ panel, width, height }) {
  const frames = framesOf(panel);
  if (!frames.length || frames.every((frame) => !frame.length)) {
    return <div style={{ color: theme.colors.text.secondary, padding: 16, textAlign: "center" }}>
      {panel.fieldConfig.defaults.noValue || "No data"}</div>;
  }
  if (panel.type === "timeseries") {
    return <TimeSeries frames={frames} width={width} height={height} timeRange={timeRange} timeZone="utc"
      legend={panel.options.legend} options={panel.options} theme={theme} />;
  }
  if (panel.type === "table") return <Table data={frames[0]} width={width} height={height} enablePagination={false} />;
  return <Values panel={panel} width={width} height={height} frames={frames} />;
}

class Panel extends React.Component {
  state = { problem: null };

  static getDerivedStateFromError(problem) {
    window.problems.push(String(problem));
    return { problem };
  }

  render() {
    const { panel } = this.props;
    const { x, y, w, h } = panel.gridPos;
    const [width, height] = [w * COLUMN - GAP, h * (ROW + GAP) - GAP];
    const place = { position: "absolute", left: x * COLUMN, top: y * (ROW + GAP), width, height };
    if (panel.type === "row") {
      return <div style={{ ...place, color: theme.colors.text.primary, fontWeight: 500, paddingTop: 4 }}>
        {panel.collapsed ? "▸" : "▾"} {panel.title}</div>;
    }
    return <div className="panel" style={{ ...place, background: theme.colors.background.primary, overflow: "hidden",
      border: `1px solid ${theme.colors.border.weak}`, borderRadius: theme.shape.radius.default }}>
      <div style={{ padding: "6px 8px", fontWeight: 500, height: HEAD, whiteSpace: "nowrap" }}>{panel.title}</div>
      <div style={{ padding: "0 8px" }}>{this.state.problem ? String(this.state.problem)
        : <Content panel={panel} width={width - 26} height={height - HEAD - 10} />}</div>
    </div>;
  }
}

window.problems = [];
const height = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * (ROW + GAP);
document.body.style.cssText = `margin: 0; padding: 12px; background: ${theme.colors.background.canvas};
  color: ${theme.colors.text.primary}; font: 14px/1.5 Inter, "DejaVu Sans", sans-serif`;
const root = document.createElement("div");
document.body.append(root);
createRoot(root).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <div style={{ fontSize: 20, marginBottom: 8 }}>{dashboard.title}</div>
    <div style={{ position: "relative", width: 24 * COLUMN, height }}>
      {dashboard.panels.map((panel) => <Panel key={panel.id} panel={panel} />)}
    </div>
  </ThemeContext.Provider>,
);
