/* The ring buffer of events and the hooks that write to it, in C; reference.py does the same in Python.

   Between two hooks torch runs for tens of microseconds and empties the caches. The cost of a hook is therefore the
   memory that it touches: here a few cache lines, in Python a few dozen. The GIL is held throughout; an event is written
   whole or not at all. Only the limited API of CPython is used, so that one build serves every version from 3.11 on. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h> /* part of Python.h from 3.12 on */

#include "abi.h"

/* Keep the code of every step together and free of rare paths: cold code costs page and cache-line misses. */
#define HOT __attribute__((hot))
#define RARE __attribute__((cold, noinline))

typedef struct {
    int64_t time; /* ns */
    int64_t word; /* argument << 8 | code */
} Event;

typedef struct {
    PyObject_HEAD
    /* Needed by every event, so kept side by side. */
    Event *events;
    uint64_t written, mask;
    uint64_t fast_until;  /* until this many are written, put() only has to append */
    unsigned long thread; /* as threading.get_ident() has it; 0 for none */
    unsigned long long muted;
    long steps_open;
    /* The rest. */
    uint64_t read;
    uint64_t low_mark; /* from this many unread events on, room is low */
    PyObject *on_event, *cuda_event_id, *on_low, *on_full; /* or NULL */
    int cuda_event_code;
    unsigned long long lost;
} EventBuffer;

/* Common to all types that write to a buffer: references, codes, and a dict of attributes. */
#define MAX_HELD 8

typedef struct {
    PyObject_HEAD
    EventBuffer *buffer;
    PyObject *held[MAX_HELD]; /* or NULL; each type defines its own */
    int begin, end, failed;
    PyObject *dict;
} Hook;

extern PyTypeObject *buffer_type, *draws_type; /* as long as the process lives */
extern PyType_Spec buffer_spec, timed_spec, draws_spec, index_lists_spec, forward_spec, steps_spec;

/* errors.c */

int prepare_errors(void);

/* Called with an error set: clear it and return 0 if our code failed. An error of the script, which its signal handler
   may raise at any point, stays set; then return -1. */
int clear_own_error(void);

/* Call a function, with an argument unless that is NULL, also while an error is set, which stays set. Returns -1 with an
   error set where the script's code raised meanwhile, otherwise 0. The result is a new reference, or NULL. */
int call_back(PyObject *function, PyObject *argument, PyObject **result);

/* The same without an argument or a result; there may be no function. */
int notify(PyObject *function);

/* buffer.c */

/* Write an event. Returns -1 with an error set if the script's code raised meanwhile. */
int put(EventBuffer *buffer, int code, int64_t argument);

/* End a call that has begun and does not take place, because the script raised meanwhile. Returns NULL. */
PyObject *end_at_once(EventBuffer *buffer, int code, int64_t argument);

/* Whether the calling thread is the training thread. */
static inline int
here(const EventBuffer *buffer)
{
    return buffer->thread == PyThread_get_thread_ident();
}

static inline int
is_muted(const EventBuffer *buffer, int code)
{
    return (int)(buffer->muted >> code & 1);
}

/* hook.c */

int prepare_hooks(void);

/* A new hook that holds so many objects: NULL and None are not held. */
Hook *new_hook(PyTypeObject *type, PyObject *buffer, PyObject *const *objects, int count);

void hook_dealloc(PyObject *self);
int hook_traverse(PyObject *self, visitproc visit, void *arg);
int hook_clear(PyObject *self);
PyObject *hook_get(PyObject *self, PyObject *object, PyObject *type);
extern PyMethodDef function_methods[];
extern PyGetSetDef function_getset[];

#define HOOK_SLOTS                                                                                                     \
    {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear}

/* Slots of a type that replaces a function or method: bound and pickled like the original. */
#define FUNCTION_SLOTS                                                                                                 \
    HOOK_SLOTS, {Py_tp_descr_get, hook_get}, {Py_tp_methods, function_methods}, {Py_tp_getset, function_getset}
#define FUNCTION_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR)

/* Return a new reference to the object of a weak reference; NULL without an error if it is gone. */
static inline PyObject *
referent(PyObject *reference)
{
    PyObject *object = PyObject_CallNoArgs(reference);
    if (object == NULL)
        PyErr_Clear();
    if (object != Py_None)
        return object;
    Py_DECREF(object);
    return NULL;
}

static inline int
is_true(PyObject *flag)
{
    return flag == Py_True ? 1 : flag == Py_False ? 0 : PyObject_IsTrue(flag);
}

/* forward.c */

int prepare_forward(void);

/* Whether a module is in training mode; -1 with an error set if it has no such attribute. */
int is_training(PyObject *module);
