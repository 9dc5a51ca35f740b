/* Steps: begins and ends of optimizer steps. */

#include "native.h"

enum { KNOWN };

HOT static int
is_known(const Hook *self, PyObject *optimizer)
{
    PyObject *own = PyLong_FromVoidPtr(optimizer);
    PyObject *reference = own == NULL ? NULL : PyDict_GetItemWithError(self->held[KNOWN], own);
    PyObject *found = reference == NULL ? NULL : referent(reference);
    Py_XDECREF(own);
    Py_XDECREF(found); /* the caller holds it */
    PyErr_Clear();
    return found == optimizer;
}

HOT static PyObject *
steps_begin(Hook *self, PyObject *optimizer)
{
    EventBuffer *buffer = self->buffer;
    if (!here(buffer) || buffer->steps_open || !is_known(self, optimizer))
        Py_RETURN_FALSE;
    int raised = put(buffer, self->begin, (int64_t)(intptr_t)optimizer);
    buffer->steps_open++; /* as for a step that raises: the next one finds this one open */
    if (raised < 0)
        return NULL;
    Py_RETURN_TRUE;
}

HOT static PyObject *
steps_end(Hook *self, PyObject *optimizer)
{
    EventBuffer *buffer = self->buffer;
    if (!here(buffer))
        Py_RETURN_FALSE;
    if (buffer->steps_open > 0)
        buffer->steps_open--;
    if (put(buffer, self->end, (int64_t)(intptr_t)optimizer) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *
steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "known", "begin", "end", NULL};
    PyObject *buffer, *known;
    int begin, end;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!ii", names, buffer_type, &buffer, &PyDict_Type, &known, &begin,
                                     &end))
        return NULL;
    Hook *self = new_hook(type, buffer, &known, 1);
    if (self == NULL)
        return NULL;
    self->begin = begin;
    self->end = end;
    return (PyObject *)self;
}

static PyMethodDef steps_methods[] = {
    {"begin", (PyCFunction)steps_begin, METH_O,
     "Write that a known optimizer steps, unless another step is at work; return whether that is so."},
    {"end", (PyCFunction)steps_end, METH_O,
     "Write that a step has ended if this is the thread that is followed; return whether it is."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot steps_slots[] = {{Py_tp_doc, "Begins and ends of optimizer steps."},
                                    {Py_tp_new, steps_new},
                                    {Py_tp_methods, steps_methods},
                                    HOOK_SLOTS,
                                    {0, NULL}};

PyType_Spec steps_spec = {"torchperfd.events._native.Steps", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          steps_slots};
