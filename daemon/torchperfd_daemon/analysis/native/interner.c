/* Numbers for texts, as a callback gives them; those that come again are found here. */

#include "native.h"

/* Beyond these all is forgotten, and asked for again. */
#define MAX_ENTRIES (1 << 17)
#define MAX_BYTES (1 << 24)
#define MAX_PROBES 32

typedef struct {
    char *text; /* or NULL */
    uint32_t length;
    uint32_t hash;
    int32_t number;
} Entry;

struct Interner {
    PyObject_HEAD
    PyObject *callback;
    Entry *entries;
    size_t capacity; /* a power of two */
    size_t count;
    size_t bytes;
};

PyTypeObject *interner_type;

static void
forget(Interner *self)
{
    for (size_t at = 0; at < self->capacity; at++)
        free(self->entries[at].text);
    free(self->entries);
    self->entries = NULL;
    self->capacity = self->count = self->bytes = 0;
}

/* Where a text is or may be put; NULL where too many others are in its way. */
static Entry *
place_of(Entry *entries, size_t capacity, const char *text, size_t length, uint32_t hash)
{
    for (size_t probe = 0; capacity != 0 && probe < MAX_PROBES; probe++) {
        Entry *entry = &entries[(hash + probe) & (capacity - 1)];
        if (entry->text == NULL)
            return entry;
        if (entry->hash == hash && entry->length == length && memcmp(entry->text, text, length) == 0)
            return entry;
    }
    return NULL;
}

/* Make room for one more entry; without memory nothing changes. */
static void
make_room(Interner *self, size_t length)
{
    if (self->count >= MAX_ENTRIES || self->bytes + length > MAX_BYTES)
        forget(self);
    if (2 * self->count < self->capacity)
        return;
    size_t capacity = self->capacity ? 2 * self->capacity : 256;
    Entry *entries = calloc(capacity, sizeof(Entry));
    if (entries == NULL)
        return;
    for (size_t at = 0; at < self->capacity; at++) {
        Entry *old = &self->entries[at];
        if (old->text == NULL)
            continue;
        Entry *moved = place_of(entries, capacity, old->text, old->length, old->hash);
        if (moved != NULL) {
            *moved = *old;
            continue;
        }
        free(old->text);
        self->count--;
        self->bytes -= old->length;
    }
    free(self->entries);
    self->entries = entries;
    self->capacity = capacity;
}

static void
keep(Interner *self, const char *text, size_t length, uint32_t hash, int32_t number)
{
    if (length > MAX_BYTES)
        return;
    make_room(self, length);
    Entry *entry = place_of(self->entries, self->capacity, text, length, hash);
    if (entry == NULL || entry->text != NULL)
        return;
    char *copy = malloc(length ? length : 1);
    if (copy == NULL)
        return;
    memcpy(copy, text, length);
    *entry = (Entry){copy, (uint32_t)length, hash, number};
    self->count++;
    self->bytes += length;
}

int32_t
intern(Interner *self, const char *text, size_t length, uint32_t hash)
{
    Entry *entry = place_of(self->entries, self->capacity, text, length, hash);
    if (entry != NULL && entry->text != NULL)
        return entry->number;
    PyObject *bytes = PyBytes_FromStringAndSize(text, (Py_ssize_t)length);
    if (bytes == NULL)
        return -1;
    PyObject *answer = PyObject_CallFunctionObjArgs(self->callback, bytes, NULL);
    Py_DECREF(bytes);
    if (answer == NULL)
        return -1;
    long number = PyLong_AsLong(answer);
    Py_DECREF(answer);
    if (number < 0 || number > INT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no number of a table");
        return -1;
    }
    keep(self, text, length, hash, (int32_t)number);
    return (int32_t)number;
}

static PyObject *
interner_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *callback;
    if (!PyArg_ParseTuple(args, "O", &callback))
        return NULL;
    Interner *self = (Interner *)PyType_GenericAlloc(type, 0);
    if (self != NULL)
        self->callback = Py_NewRef(callback);
    return (PyObject *)self;
}

static int
interner_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Interner *)self)->callback);
    return 0;
}

static int
interner_clear(PyObject *self)
{
    Py_CLEAR(((Interner *)self)->callback);
    return 0;
}

static void
interner_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    interner_clear(self);
    forget((Interner *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_new, interner_new},           {Py_tp_dealloc, interner_dealloc}, {Py_tp_traverse, interner_traverse},
    {Py_tp_clear, interner_clear},       {0, NULL},
};

PyType_Spec interner_spec = {"torchperfd_daemon.analysis._native.Interner", sizeof(Interner), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
