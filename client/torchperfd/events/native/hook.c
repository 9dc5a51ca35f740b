/* What all hooks have in common, and Timed: a function or method between two events. */

#include "native.h"

enum { ORIGINAL };

static PyObject *method_type, *name_qualname;

int
prepare_hooks(void)
{
    PyObject *types = PyImport_ImportModule("types");
    method_type = types == NULL ? NULL : PyObject_GetAttrString(types, "MethodType");
    Py_XDECREF(types);
    name_qualname = PyUnicode_InternFromString("__qualname__");
    return method_type == NULL || name_qualname == NULL ? -1 : 0;
}

Hook *
new_hook(PyTypeObject *type, PyObject *buffer, PyObject *const *objects, int count)
{
    Hook *self = (Hook *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->buffer = (EventBuffer *)Py_NewRef(buffer);
    for (int number = 0; number < count; number++)
        self->held[number] = objects[number] == Py_None ? NULL : Py_XNewRef(objects[number]);
    return self;
}

int
hook_traverse(PyObject *self, visitproc visit, void *arg)
{
    Hook *hook = (Hook *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(hook->buffer);
    Py_VISIT(hook->dict);
    for (int number = 0; number < MAX_HELD; number++)
        Py_VISIT(hook->held[number]);
    return 0;
}

int
hook_clear(PyObject *self)
{
    Hook *hook = (Hook *)self;
    Py_CLEAR(hook->buffer);
    Py_CLEAR(hook->dict);
    for (int number = 0; number < MAX_HELD; number++)
        Py_CLEAR(hook->held[number]);
    return 0;
}

void
hook_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

PyObject *
hook_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    if (object == NULL || object == Py_None)
        return Py_NewRef(self);
    return PyObject_CallFunctionObjArgs(method_type, self, object, NULL);
}

/* By name, as a function. What wraps a function takes over its names. */
static PyObject *
function_reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttr(self, name_qualname);
}

PyMethodDef function_methods[] = {
    {"__reduce__", (PyCFunction)function_reduce, METH_NOARGS, "Pickle by name."}, {NULL, NULL, 0, NULL}};

static PyObject *
function_original(PyObject *self, void *Py_UNUSED(none))
{
    return Py_NewRef(((Hook *)self)->held[ORIGINAL]);
}

static int
function_set_original(PyObject *self, PyObject *original, void *Py_UNUSED(none))
{
    if (original == NULL) {
        PyErr_SetString(PyExc_AttributeError, "original cannot be deleted");
        return -1;
    }
    PyObject *before = ((Hook *)self)->held[ORIGINAL];
    ((Hook *)self)->held[ORIGINAL] = Py_NewRef(original);
    Py_DECREF(before);
    return 0;
}

PyGetSetDef function_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {"original", function_original, function_set_original, "What is called between the two events.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

HOT static PyObject *
timed_call(Hook *self, PyObject *args, PyObject *kwargs)
{
    EventBuffer *buffer = self->buffer;
    PyObject *original = Py_NewRef(self->held[ORIGINAL]), *result; /* the call may replace it */
    int is_timed = here(buffer) && !is_muted(buffer, self->begin);
    if (is_timed && put(buffer, self->begin, 0) < 0)
        result = end_at_once(buffer, self->failed, 0);
    else {
        result = PyObject_Call(original, args, kwargs);
        if (is_timed && here(buffer) && put(buffer, result == NULL ? self->failed : self->end, 0) < 0)
            Py_CLEAR(result);
    }
    Py_DECREF(original);
    return result;
}

static PyObject *
timed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "original", "begin", "end", "failed", NULL};
    PyObject *buffer, *original;
    int begin, end, failed = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!Oii|i", names, buffer_type, &buffer, &original, &begin, &end,
                                     &failed))
        return NULL;
    Hook *self = new_hook(type, buffer, &original, 1);
    if (self == NULL)
        return NULL;
    self->begin = begin;
    self->end = end;
    self->failed = failed < 0 ? end : failed;
    return (PyObject *)self;
}

static PyMemberDef timed_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(Hook, dict), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot timed_slots[] = {{Py_tp_doc, "A function or method between two events."},
                                    {Py_tp_new, timed_new},
                                    {Py_tp_call, timed_call},
                                    {Py_tp_members, timed_members},
                                    FUNCTION_SLOTS,
                                    {0, NULL}};

PyType_Spec timed_spec = {"torchperfd.events._native.Timed", sizeof(Hook), 0, FUNCTION_FLAGS, timed_slots};
