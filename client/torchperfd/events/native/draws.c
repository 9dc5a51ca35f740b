/* Draws: the __next__ of an iterator over batches, between two events. */

#include "native.h"

/* As in events.py. */
#define DRAW_WITHOUT_GRADIENTS 1
#define DRAW_IN_EVALUATION 2

/* As in reference.py. */
#define ONE_OR_BATCH (-1)

enum { ORIGINAL, PLAIN, TENSOR, AHEAD, SAMPLES_IN, GRAD_ENABLED, MODELS, COUNT };

typedef struct {
    Hook hook;
    lenfunc tensor_length; /* or NULL */
    long long known;       /* samples of the batch that is being drawn; 0 if unknown, ONE_OR_BATCH */
    char watching;
} Draws;

/* The samples of an unusual batch, as Python counts them; -1 with an error set where a signal handler raised meanwhile. */
RARE static int64_t
count_unusual(const Draws *self, PyObject *batch)
{
    int64_t samples = 0;
    PyObject *counted;
    int raised = call_back(self->hook.held[SAMPLES_IN], batch, &counted);
    if (counted != NULL && PyLong_Check(counted))
        samples = PyLong_AsLongLong(counted);
    Py_XDECREF(counted);
    if (raised < 0)
        return -1;
    PyErr_Clear(); /* a number too large to be one */
    return samples > 0 ? samples : 0;
}

/* The length of a plain tensor; 0 for a scalar, -1 with an error set where the script's code raised meanwhile: a mode of
   its own may be on, and change the batch. */
HOT static int64_t
length_of(const Draws *self, PyObject *tensor)
{
    Py_INCREF(tensor);
    Py_ssize_t length = self->tensor_length == NULL ? 0 : self->tensor_length(tensor);
    Py_DECREF(tensor);
    return length < 0 ? clear_own_error() : length;
}

/* How many samples a batch holds, 0 if unknown; -1 with an error set where the script's code raised meanwhile. Here: a
   tensor, or a list, tuple or dict whose first two parts are tensors of one length. */
HOT static int64_t
count_samples(const Draws *self, PyObject *batch)
{
    PyObject *tensor = self->hook.held[TENSOR], *first = NULL, *second = NULL;
    Py_ssize_t position = 0;
    if ((PyObject *)Py_TYPE(batch) == tensor)
        first = batch;
    else if (PyList_CheckExact(batch) && PyList_Size(batch) > 1) {
        first = PyList_GetItem(batch, 0);
        second = PyList_GetItem(batch, 1);
    }
    else if (PyTuple_CheckExact(batch) && PyTuple_Size(batch) > 1) {
        first = PyTuple_GetItem(batch, 0);
        second = PyTuple_GetItem(batch, 1);
    }
    else if (PyDict_CheckExact(batch) && PyDict_Size(batch) > 1) {
        PyDict_Next(batch, &position, NULL, &first);
        PyDict_Next(batch, &position, NULL, &second);
    }
    if (first == NULL || (PyObject *)Py_TYPE(first) != tensor)
        return count_unusual(self, batch);
    if (second != NULL && (PyObject *)Py_TYPE(second) != tensor)
        return count_unusual(self, batch);
    Py_XINCREF(second);
    int64_t samples = length_of(self, first);
    int64_t other = samples > 0 && second != NULL ? length_of(self, second) : samples;
    Py_XDECREF(second);
    if (samples < 0 || other < 0)
        return -1;
    return samples > 0 && samples == other ? samples : count_unusual(self, batch);
}

/* Which DRAW_... hold; a model without the attribute counts as in training mode. -1 with an error set where the
   script's code raised meanwhile. */
HOT static int64_t
evaluation_flags(const Draws *self)
{
    PyObject *models = self->hook.held[MODELS], *flag = PyObject_CallNoArgs(self->hook.held[GRAD_ENABLED]);
    int64_t flags = flag == Py_False ? DRAW_WITHOUT_GRADIENTS : 0;
    int found = 0;
    Py_XDECREF(flag);
    if (flag == NULL && clear_own_error() < 0)
        return -1;
    for (Py_ssize_t number = 0; number < PyList_Size(models); number++) {
        PyObject *module = referent(PyList_GetItem(models, number));
        if (module == NULL)
            continue;
        int training = is_training(module);
        Py_DECREF(module);
        if (training < 0 && clear_own_error() < 0)
            return -1;
        if (training != 0)
            return flags;
        found = 1;
    }
    return found ? flags | DRAW_IN_EVALUATION : flags;
}

/* Have Python write the first event, which may be another one. Returns whether the draw is timed; -1 with an error set
   where a signal handler raised. */
RARE static int
announce(const Draws *self, PyObject *iterator)
{
    PyObject *announced;
    int raised = call_back(self->hook.held[AHEAD], iterator, &announced);
    int timed = announced == Py_True;
    Py_XDECREF(announced);
    return raised < 0 ? -1 : timed;
}

/* The next batch, between two events. */
HOT static PyObject *
draw(Draws *self, PyObject *iterator, PyObject *args, PyObject *kwargs)
{
    Hook *hook = &self->hook;
    EventBuffer *buffer = hook->buffer;
    int64_t own = (int64_t)(intptr_t)iterator;
    if (self->watching || buffer->steps_open || (PyObject *)Py_TYPE(iterator) != hook->held[PLAIN]) {
        int timed = announce(self, iterator);
        if (timed <= 0)
            return timed < 0 ? NULL : PyObject_Call(hook->held[ORIGINAL], args, kwargs);
    }
    else {
        int64_t flags = evaluation_flags(self);
        if (flags < 0 || put(buffer, hook->begin, own | flags) < 0)
            return end_at_once(buffer, hook->failed, own);
    }
    PyObject *batch = PyObject_Call(hook->held[ORIGINAL], args, kwargs);
    if (batch == NULL) {
        put(buffer, hook->failed, own);
        return NULL;
    }
    int64_t samples = self->known > 0 ? self->known : count_samples(self, batch);
    if (self->known == ONE_OR_BATCH && samples > 1)
        samples = count_unusual(self, batch);
    if (samples < 0)
        Py_CLEAR(batch);
    if (put(buffer, hook->end, samples > 0 ? samples : 0) < 0)
        Py_CLEAR(batch);
    return batch;
}

HOT static PyObject *
draws_call(Draws *self, PyObject *args, PyObject *kwargs)
{
    if (!here(self->hook.buffer) || PyTuple_Size(args) != 1)
        return PyObject_Call(self->hook.held[ORIGINAL], args, kwargs);
    /* A data set may draw from another iterator meanwhile. */
    long long around = self->known;
    self->known = 0;
    PyObject *batch = draw(self, PyTuple_GetItem(args, 0), args, kwargs);
    self->known = around;
    return batch;
}

static PyObject *
draws_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer",  "original",  "begin",      "end",          "failed", "plain", "tensor",
                            "ahead", "samples_in", "grad_enabled", "models", NULL};
    PyObject *buffer, *held[COUNT];
    int begin, end, failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OiiiOO!OOOO!", names, buffer_type, &buffer, &held[ORIGINAL], &begin,
                                     &end, &failed, &held[PLAIN], &PyType_Type, &held[TENSOR], &held[AHEAD],
                                     &held[SAMPLES_IN], &held[GRAD_ENABLED], &PyList_Type, &held[MODELS]))
        return NULL;
    Draws *self = (Draws *)new_hook(type, buffer, held, COUNT);
    if (self == NULL)
        return NULL;
    self->hook.begin = begin;
    self->hook.end = end;
    self->hook.failed = failed;
    self->watching = 1;
    /* Of the C type beneath the class: the class itself gives it in Python, and makes a shape for it. */
    PyTypeObject *base = PyType_GetSlot((PyTypeObject *)held[TENSOR], Py_tp_base);
    self->tensor_length = base == NULL ? NULL : (lenfunc)PyType_GetSlot(base, Py_mp_length);
    return (PyObject *)self;
}

static PyMemberDef draws_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(Hook, dict), READONLY, NULL},
    {"watching", T_BOOL, offsetof(Draws, watching), 0, "Whether every draw is announced."},
    {"known", T_LONGLONG, offsetof(Draws, known), 0, "Samples of the batch that is being drawn; 0 if unknown."},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot draws_slots[] = {{Py_tp_doc, "The __next__ of an iterator over batches, between two events."},
                                    {Py_tp_new, draws_new},
                                    {Py_tp_call, draws_call},
                                    {Py_tp_members, draws_members},
                                    FUNCTION_SLOTS,
                                    {0, NULL}};

/* The iterator's own way to its next indices: notes how many they are, for the draw that asked for them. */

enum { NEXT_INDEX, DRAWS, ITERATOR, KIND, MAP_STYLE, NOTE, OTHERWISE, LISTS_COUNT };

PyTypeObject *draws_type;

/* Whether a data set has indices; -1 with an error set where the iterator has no such attribute. */
HOT static int
is_map_style(const Hook *hook, PyObject *iterator)
{
    PyObject *kind = PyObject_GetAttr(iterator, hook->held[KIND]);
    int equal = kind == NULL ? -1 : kind == hook->held[MAP_STYLE];
    Py_XDECREF(kind);
    return equal;
}

/* Here: a list of several indices, without workers. Python does all else. */
HOT static PyObject *
index_lists_call(Hook *hook, PyObject *args, PyObject *kwargs)
{
    PyObject *iterator = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    if (!here(hook->buffer) || iterator == NULL || (PyObject *)Py_TYPE(iterator) != hook->held[ITERATOR])
        return PyObject_Call(hook->held[OTHERWISE], args, kwargs);
    PyObject *indices = PyObject_Call(hook->held[NEXT_INDEX], args, kwargs);
    if (indices == NULL)
        return NULL;
    Py_ssize_t length = PyList_CheckExact(indices) ? PyList_Size(indices) : 0;
    int fits = length > 1 ? is_map_style(hook, iterator) : -1;
    if (fits > 0)
        ((Draws *)hook->held[DRAWS])->known = length;
    if (fits >= 0)
        return indices;
    PyErr_Clear();
    PyObject *noted = PyObject_CallFunctionObjArgs(hook->held[NOTE], iterator, indices, NULL);
    if (noted == NULL && clear_own_error() < 0)
        Py_CLEAR(indices);
    Py_XDECREF(noted);
    return indices;
}

static PyObject *
index_lists_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "original", "draws", "plain", "kind", "map_style", "note", "otherwise", NULL};
    PyObject *buffer, *held[LISTS_COUNT];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOO!UOOO", names, buffer_type, &buffer, &held[NEXT_INDEX],
                                     &held[DRAWS], &PyType_Type, &held[ITERATOR], &held[KIND], &held[MAP_STYLE],
                                     &held[NOTE], &held[OTHERWISE]))
        return NULL;
    if (Py_TYPE(held[DRAWS]) != draws_type) {
        PyErr_SetString(PyExc_TypeError, "draws must be of the type Draws");
        return NULL;
    }
    return (PyObject *)new_hook(type, buffer, held, LISTS_COUNT);
}

static PyMemberDef index_lists_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(Hook, dict), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot index_lists_slots[] = {{Py_tp_doc, "The next indices of an iterator over batches, which are noted."},
                                          {Py_tp_new, index_lists_new},
                                          {Py_tp_call, index_lists_call},
                                          {Py_tp_members, index_lists_members},
                                          FUNCTION_SLOTS,
                                          {0, NULL}};

PyType_Spec index_lists_spec = {"torchperfd.events._native.IndexLists", sizeof(Hook), 0, FUNCTION_FLAGS,
                                index_lists_slots};

PyType_Spec draws_spec = {"torchperfd.events._native.Draws", sizeof(Draws), 0, FUNCTION_FLAGS, draws_slots};
