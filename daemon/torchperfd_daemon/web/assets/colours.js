// Colours of canvases, read from kit.css, so that light and dark have one definition.

const cache = new Map();
const scheme = matchMedia("(prefers-color-scheme: dark)");
scheme.addEventListener("change", () => cache.clear());

/** Call a function whenever the colour scheme changes. */
export function onSchemeChange(callback) {
  scheme.addEventListener("change", callback);
}

/** Return the value of a colour of kit.css, such as "ink" or "phase-data". */
export function colour(name) {
  if (!cache.has(name)) cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return cache.get(name);
}

/** Return a colour as a little-endian pixel of ImageData. The colour must be written #rrggbb. */
export function pixel(name) {
  const key = `pixel ${name}`;
  if (!cache.has(key)) cache.set(key, toPixel(parts(colour(name))));
  return cache.get(key);
}

/** Return steps from one colour to another as pixels, for a scale. */
export function scale(names, steps) {
  const key = `scale ${names.join(" ")} ${steps}`;
  if (!cache.has(key)) {
    const stops = names.map((name) => parts(colour(name)));
    cache.set(
      key,
      Uint32Array.from({ length: steps }, (_, at) => {
        const place = (at / (steps - 1)) * (stops.length - 1);
        const low = Math.min(stops.length - 2, Math.floor(place));
        return toPixel(stops[low].map((value, channel) => value + (stops[low + 1][channel] - value) * (place - low)));
      }),
    );
  }
  return cache.get(key);
}

function parts(text) {
  const number = Number.parseInt(text.slice(1), 16);
  return [(number >> 16) & 255, (number >> 8) & 255, number & 255];
}

function toPixel([red, green, blue]) {
  return ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;
}
