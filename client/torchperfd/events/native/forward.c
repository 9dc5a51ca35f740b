/* Forward: the call of one module, between two events. */

#include "native.h"

/* As in events.py, and one more. */
#define EVALUATE_IN_TRAINING_MODE 1
#define EVALUATE_WITH_GRADIENTS 2
#define TRAINS 3

enum { MODULE, COMPILED, METHOD, GRAD_ENABLED, COUNT };

typedef struct {
    Hook hook; /* of which begin is the code of a call for training */
    int evaluate;
} Forward;

static PyObject *name_training;

int
prepare_forward(void)
{
    name_training = PyUnicode_InternFromString("training");
    return name_training == NULL ? -1 : 0;
}

HOT int
is_training(PyObject *module)
{
    PyObject *flag = PyObject_GetAttr(module, name_training);
    int training = flag == NULL ? -1 : is_true(flag);
    Py_XDECREF(flag);
    return training;
}

/* Which EVALUATE_... hold for a call that is not for training, TRAINS for one that is; -1 with an error set where the
   script's code raised meanwhile. */
HOT static int
evaluation(const Forward *self, PyObject *module)
{
    int training = is_training(module), gradients = -1;
    if (training >= 0) {
        PyObject *flag = PyObject_CallNoArgs(self->hook.held[GRAD_ENABLED]);
        gradients = flag == NULL ? -1 : is_true(flag);
        Py_XDECREF(flag);
    }
    if (training < 0 || gradients < 0)
        return clear_own_error() < 0 ? -1 : TRAINS;
    if (training)
        return gradients ? TRAINS : EVALUATE_IN_TRAINING_MODE;
    return gradients ? EVALUATE_WITH_GRADIENTS : 0;
}

/* Call what stood in this place before, or else the module's own method. */
HOT static PyObject *
call_module(const Forward *self, PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *compiled = self->hook.held[COMPILED];
    PyObject *call = compiled == NULL ? PyObject_GetAttr(module, self->hook.held[METHOD]) : Py_NewRef(compiled);
    PyObject *result = call == NULL ? NULL : PyObject_Call(call, args, kwargs);
    Py_XDECREF(call);
    return result;
}

/* The same, between two events. */
HOT static PyObject *
call_timed(const Forward *self, PyObject *module, PyObject *args, PyObject *kwargs)
{
    EventBuffer *buffer = self->hook.buffer;
    int argument = evaluation(self, module);
    if (argument < 0)
        return NULL;
    int code = argument == TRAINS ? self->hook.begin : self->evaluate;
    if (is_muted(buffer, code))
        return call_module(self, module, args, kwargs);
    if (put(buffer, code, argument == TRAINS ? 0 : argument) < 0)
        return end_at_once(buffer, self->hook.end, 0);
    PyObject *result = call_module(self, module, args, kwargs);
    if (here(buffer) && put(buffer, self->hook.end, 0) < 0)
        Py_CLEAR(result);
    return result;
}

HOT static PyObject *
forward_call(Forward *self, PyObject *args, PyObject *kwargs)
{
    PyObject *module = referent(self->hook.held[MODULE]);
    if (module == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the module whose call was timed is gone");
        return NULL;
    }
    PyObject *result = (here(self->hook.buffer) ? call_timed : call_module)(self, module, args, kwargs);
    Py_DECREF(module);
    return result;
}

/* Where a module is copied or pickled together with its dict, the copy has nothing in this place. */
static PyObject *
forward_reduce(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("O()", (PyObject *)Py_TYPE(Py_None));
}

static PyObject *
forward_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "module", "compiled", "method", "grad_enabled", "train", "evaluate", "end", NULL};
    PyObject *buffer, *module, *held[COUNT];
    int train, evaluate, end;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOUOiii", names, buffer_type, &buffer, &module,
                                     &held[COMPILED], &held[METHOD], &held[GRAD_ENABLED], &train, &evaluate, &end))
        return NULL;
    held[MODULE] = PyWeakref_NewRef(module, NULL); /* in the module's own dict this must not keep it alive */
    Forward *self = held[MODULE] == NULL ? NULL : (Forward *)new_hook(type, buffer, held, COUNT);
    Py_XDECREF(held[MODULE]);
    if (self == NULL)
        return NULL;
    self->hook.begin = train;
    self->hook.end = end;
    self->evaluate = evaluate;
    return (PyObject *)self;
}

static PyMethodDef forward_methods[] = {
    {"__reduce__", (PyCFunction)forward_reduce, METH_NOARGS, "Pickle as None."}, {NULL, NULL, 0, NULL}};

static PyType_Slot forward_slots[] = {{Py_tp_doc, "The call of one module, between two events."},
                                      {Py_tp_new, forward_new},
                                      {Py_tp_call, forward_call},
                                      {Py_tp_methods, forward_methods},
                                      HOOK_SLOTS,
                                      {0, NULL}};

PyType_Spec forward_spec = {"torchperfd.events._native.Forward", sizeof(Forward), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, forward_slots};
