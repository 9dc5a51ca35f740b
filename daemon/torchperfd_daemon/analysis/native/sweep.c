/* One pass over the graph of a replay; advice/sweep.py describes what it does, and does it in Python as well. */

#include "native.h"

/* As Graph and Durations have them, and then what is written. */
enum { ORDER, STREAM, SEGMENT, CAUSE, TARGET, INDEXES };
enum { THROUGH = INDEXES, BY_LAUNCH, BY_CAUSE, CALL, LAG, FIXED, WORK_START, WORK_END, STREAMS, NODES, ENDS, COLUMNS };

typedef struct {
    const int64_t *index[INDEXES];
    double *value[COLUMNS]; /* from INDEXES on */
    size_t runs, nodes, streams;
} Graph;

static int
is_below(int64_t position, size_t count)
{
    return position >= 0 && (uint64_t)position < count;
}

/* `offsets` has room for one more than all nodes. Returns 0 if a position is outside its column. */
static int
sweep_graph(const Graph *graph, double offset, int is_first, double *offsets)
{
    double *const *value = graph->value;
    double *streams = value[STREAMS], *ends = value[ENDS];
    for (size_t node = 0; node <= graph->nodes; node++)
        offsets[node] = offset;
    for (size_t at = 0; at < graph->runs + graph->nodes; at++) {
        int64_t number = graph->index[ORDER][at];
        if (number >= 0) {
            if (!is_below(number, graph->runs))
                return 0;
            int64_t stream = graph->index[STREAM][number], segment = graph->index[SEGMENT][number];
            int64_t cause = graph->index[CAUSE][number];
            if (!is_below(stream, graph->streams) || !is_below(segment, graph->nodes + 1)
                || (cause >= 0 && !is_below(cause, graph->runs)))
                return 0;
            double end = streams[stream] + value[THROUGH][number];
            double launched = offsets[segment] + value[BY_LAUNCH][number];
            if (launched > end)
                end = launched;
            if (cause >= 0) {
                double held = ends[cause] + value[BY_CAUSE][number];
                if (held > end)
                    end = held;
            }
            streams[stream] = ends[number] = end;
        } else {
            int64_t node = -1 - number;
            if (!is_below(node, graph->nodes))
                return 0;
            double now = offset + value[WORK_START][node] + value[CALL][node];
            int64_t target = graph->index[TARGET][node];
            if (target >= 0) {
                if (!is_below(target, graph->runs))
                    return 0;
                double waited = ends[target] + value[LAG][node];
                if (waited > now)
                    now = waited;
            } else if (is_first && value[FIXED][node] > now) {
                now = value[FIXED][node];
            }
            value[NODES][node] = now;
            offset = now - value[WORK_END][node];
            offsets[node + 1] = offset;
        }
    }
    return 1;
}

static size_t
wanted_length(const Graph *graph, int column)
{
    switch (column) {
    case ORDER:
        return graph->runs + graph->nodes;
    case STREAMS:
        return graph->streams;
    case STREAM:
    case SEGMENT:
    case CAUSE:
    case THROUGH:
    case BY_LAUNCH:
    case BY_CAUSE:
    case ENDS:
        return graph->runs;
    default:
        return graph->nodes;
    }
}

/* Of the buffers of all columns; 0 if their lengths do not fit each other. */
static int
fill_graph(const Py_buffer *buffers, Graph *graph)
{
    graph->runs = (size_t)buffers[ENDS].len / sizeof(double);
    graph->nodes = (size_t)buffers[NODES].len / sizeof(double);
    graph->streams = (size_t)buffers[STREAMS].len / sizeof(double);
    for (int column = 0; column < COLUMNS; column++) {
        if ((size_t)buffers[column].len != wanted_length(graph, column) * sizeof(double))
            return 0;
        if (column < INDEXES)
            graph->index[column] = buffers[column].buf;
        else
            graph->value[column] = buffers[column].buf;
    }
    return 1;
}

PyObject *
sweep(PyObject *module, PyObject *args)
{
    PyObject *columns, *found = NULL;
    double offset, *offsets = NULL;
    int is_first, held = 0;
    Py_buffer buffers[COLUMNS];
    Graph graph;
    if (!PyArg_ParseTuple(args, "O!dp", &PyTuple_Type, &columns, &offset, &is_first))
        return NULL;
    if (PyTuple_Size(columns) != COLUMNS) {
        PyErr_SetString(PyExc_ValueError, "too many or too few columns");
        return NULL;
    }
    for (; held < COLUMNS; held++)
        if (PyObject_GetBuffer(PyTuple_GetItem(columns, held), &buffers[held],
                               held < STREAMS ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
            goto done;
    if (!fill_graph(buffers, &graph)) {
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
    } else if ((offsets = malloc((graph.nodes + 1) * sizeof(double))) == NULL) {
        PyErr_NoMemory();
    } else if (!sweep_graph(&graph, offset, is_first, offsets)) {
        PyErr_SetString(PyExc_ValueError, "a position outside its column");
    } else {
        found = Py_NewRef(Py_None);
    }
    free(offsets);
done:
    while (held > 0)
        PyBuffer_Release(&buffers[--held]);
    return found;
}
