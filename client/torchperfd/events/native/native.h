/* The ring buffer of events and the hooks that write to it, in C; portable.py does the same in Python.

   Between two hooks torch runs for tens of microseconds and empties the caches. What a hook costs is therefore the memory
   it touches: here a few cache lines, in Python a few dozen. Everything is done under the GIL; an event is written whole
   or not at all. Only the limited API of CPython is used, so that one build serves every version from 3.11 on. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h> /* part of Python.h from 3.12 on */

/* What runs in every step stands together and contains nothing rare: cold code costs by the page and by the line. */
#define HOT __attribute__((hot))
#define RARE __attribute__((cold, noinline))

typedef struct {
    int64_t time; /* ns */
    int64_t word; /* argument << 8 | code */
} Event;

typedef struct {
    PyObject_HEAD
    /* What every event needs, side by side. */
    Event *events;
    uint64_t written, mask;
    uint64_t calm;        /* until so many are written, there is nothing to do but to write */
    unsigned long thread; /* as threading.get_ident() has it; 0 for none */
    unsigned long long muted;
    long steps_open;
    /* The rest. */
    uint64_t read;
    uint64_t quiet; /* with so many events on it, or more, room is low */
    PyObject *on_event, *ticket, *on_low, *on_full; /* or NULL */
    int ticket_code;
    unsigned long long lost;
} Tape;

/* What all types that write to a tape have in common: references, codes, and a dict of attributes. */
#define MAX_HELD 8

typedef struct {
    PyObject_HEAD
    Tape *tape;
    PyObject *held[MAX_HELD]; /* or NULL; what they are is up to the type */
    int begin, end, failed;
    PyObject *dict;
} Hook;

extern PyTypeObject *tape_type; /* as long as the process lives */
extern PyType_Spec tape_spec, timed_spec, draws_spec, forward_spec, steps_spec;

/* errors.c */

int prepare_errors(void);

/* An error is set: clear it if our code failed, and return 0. The script's own, which a signal handler raises wherever the
   program is, stays set; then -1. */
int clear_own_error(void);

/* Call a function, with an argument unless that is NULL, also while an error is set, which stays set. Returns -1 with an
   error set where the script's code raised meanwhile, otherwise 0. The result is a new reference, or NULL. */
int call_back(PyObject *function, PyObject *argument, PyObject **result);

/* The same without an argument or a result; there may be no function. */
int notify(PyObject *function);

/* tape.c */

/* Write an event; -1 with an error set where the script's code raised meanwhile. */
int put(Tape *tape, int code, int64_t argument);

/* What has begun does not take place, because the script raised meanwhile: end it. Returns NULL. */
PyObject *end_at_once(Tape *tape, int code, int64_t argument);

/* Whether the calling thread is the one that is followed. */
static inline int
here(const Tape *tape)
{
    return tape->thread == PyThread_get_thread_ident();
}

static inline int
is_muted(const Tape *tape, int code)
{
    return (int)(tape->muted >> code & 1);
}

/* hook.c */

int prepare_hooks(void);

/* A new hook that holds so many objects: NULL and None are not held. */
Hook *new_hook(PyTypeObject *type, PyObject *tape, PyObject *const *objects, int count);

void hook_dealloc(PyObject *self);
int hook_traverse(PyObject *self, visitproc visit, void *arg);
int hook_clear(PyObject *self);
PyObject *hook_get(PyObject *self, PyObject *object, PyObject *type);
extern PyMethodDef function_methods[];
extern PyGetSetDef function_getset[];

#define HOOK_SLOTS                                                                                                     \
    {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear}

/* What stands in the place of a function or method: it is bound and pickled as that would be. */
#define FUNCTION_SLOTS                                                                                                 \
    HOOK_SLOTS, {Py_tp_descr_get, hook_get}, {Py_tp_methods, function_methods}, {Py_tp_getset, function_getset}
#define FUNCTION_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR)

/* What a weak reference refers to, a new reference; NULL without an error if that is gone. */
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

/* Whether a module is in training mode; -1 with an error set if it does not say. */
int is_training(PyObject *module);
