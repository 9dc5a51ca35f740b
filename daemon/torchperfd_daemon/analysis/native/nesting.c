/* Nests calls; intervals.py describes what it does, and does it in Python as well. */

#include "native.h"

/* Each position's parent and stop, thread after thread; `open` has room for all. */
static void
nest_calls(const int64_t *starts, const int64_t *ends, const int32_t *threads, size_t count, int64_t *parents,
           int64_t *stops, int64_t *open)
{
    size_t depth = 0;
    for (size_t call = 0; call < count; call++) {
        int is_first = call > 0 && threads[call] != threads[call - 1];
        while (depth > 0 && (is_first || starts[call] >= ends[open[depth - 1]] || ends[call] > ends[open[depth - 1]]))
            stops[open[--depth]] = (int64_t)call;
        parents[call] = depth > 0 ? open[depth - 1] : -1;
        open[depth++] = (int64_t)call;
    }
    while (depth > 0)
        stops[open[--depth]] = (int64_t)count;
}

PyObject *
nest(PyObject *module, PyObject *args)
{
    Py_buffer starts, ends, threads, parents, stops;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*", &starts, &ends, &threads, &parents, &stops))
        return NULL;
    PyObject *found = NULL;
    size_t count = (size_t)starts.len / sizeof(int64_t);
    int64_t *open = NULL;
    if (ends.len != starts.len || parents.len != starts.len || stops.len != starts.len
        || threads.len != (Py_ssize_t)(count * sizeof(int32_t))) {
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
    } else if ((open = malloc(count ? count * sizeof(int64_t) : 1)) == NULL) {
        PyErr_NoMemory();
    } else {
        nest_calls(starts.buf, ends.buf, threads.buf, count, parents.buf, stops.buf, open);
        found = Py_NewRef(Py_None);
    }
    free(open);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&threads);
    PyBuffer_Release(&parents);
    PyBuffer_Release(&stops);
    return found;
}
