/* The tape and what writes on it, in C; portable.py says the same in Python.

   Between two calls of ours torch runs for tens of microseconds and leaves nothing of ours in
   the caches. What a hook costs is therefore what it touches: here a few cache lines, in Python
   a few dozen. Everything is done under the GIL; an event is written whole or not at all. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* Cold code costs by the page and by the line: what runs in every step stands together, is there once, and has
   nothing in it that is rare. */
#define HOT __attribute__((hot))
#define RARE __attribute__((cold, noinline))

/* What tells threads apart. Python's identifier goes through two libraries; where their C library lays threads out as
   glibc and musl do, it is this register, and the same distance further for every thread. */
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)) && defined(__has_builtin)
#if __has_builtin(__builtin_thread_pointer)
#define THIS_THREAD() ((unsigned long)__builtin_thread_pointer())
#endif
#endif
#ifndef THIS_THREAD
#define THIS_THREAD() PyThread_get_thread_ident()
#endif

/* What events.py calls so. */
#define DRAW_WITHOUT_GRADIENTS 1
#define DRAW_IN_EVALUATION 2
#define EVALUATE_IN_TRAINING_MODE 1
#define EVALUATE_WITH_GRADIENTS 2
#define TRAINS 3
#define MAX_PLAIN_ARGUMENTS 8
#define ARGUMENT_SHIFT 8
#define MAX_PER_EVENT 2 /* the event, and a ticket for it */

typedef struct {
    int64_t time;
    int64_t word; /* argument << 8 | code */
} Event;

typedef struct {
    PyObject_HEAD
    /* What every event needs, side by side. */
    Event *events;
    uint64_t written, mask;
    uint64_t calm; /* until so many are written, nothing is to be done but to write */
    unsigned long thread; /* as THIS_THREAD() says; 0 for none */
    unsigned long long muted;
    long steps_open;
    /* The rest. */
    uint64_t read;
    uint64_t quiet; /* with so many events on it, or more, there is something to look at */
    PyObject *on_event, *ticket; /* or NULL */
    int ticket_code;
    unsigned long long lost;
    PyObject *on_low, *on_full;
} Tape;

static unsigned long identifiers_ahead; /* of THIS_THREAD() */
static PyObject *name_call_impl, *name_qualname, *name_training;
static PyObject *is_from_script; /* of interrupts.py */

HOT static int64_t
now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at); /* the clock of time.perf_counter_ns() */
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* What a weak reference refers to, a new reference; NULL without an error where that is gone. */
HOT static PyObject *
referent(PyObject *reference)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object = NULL;
    if (PyWeakref_GetRef(reference, &object) < 0)
        PyErr_Clear();
    return object;
#else
    PyObject *object = PyWeakref_GET_OBJECT(reference);
    return object == Py_None ? NULL : Py_NewRef(object);
#endif
}

/* Which state of a type this is: no other, and none of another type, has the same; 0 where none is known. */
HOT static inline unsigned int
version_of(const PyTypeObject *type)
{
#if PY_VERSION_HEX < 0x030C0000
    if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG))
        return 0;
#endif
    return type->tp_version_tag;
}

/* An attribute of a type, remembered until something of that type changes. */
typedef struct {
    unsigned int version;
    PyObject *found; /* or NULL */
} Remembered;

RARE static PyObject *
look_up(Remembered *remembered, PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    if (found != NULL) {
        remembered->version = version_of(type);
        Py_XSETREF(remembered->found, Py_NewRef(found));
    }
    return found;
}

/* The attribute of an object's type, a new reference; NULL with an error set where there is none. */
HOT static inline PyObject *
attribute_of_type(Remembered *remembered, PyObject *object, PyObject *name)
{
    PyTypeObject *type = Py_TYPE(object);
    unsigned int version = version_of(type);
    if (version != 0 && version == remembered->version)
        return Py_NewRef(remembered->found);
    return look_up(remembered, type, name);
}

HOT static inline int
is_true(PyObject *flag)
{
    return flag == Py_True ? 1 : flag == Py_False ? 0 : PyObject_IsTrue(flag);
}

/* An error is set by something that we called, if only through an attribute. Clear it if our code failed. The script's
   own, which a signal handler raises wherever the program is, stays set; then -1. */
RARE static int
clear_own_error(void)
{
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *answer = PyObject_CallOneArg(is_from_script, value);
    if (answer == Py_True) {
        Py_DECREF(answer);
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    if (answer == NULL && !PyErr_ExceptionMatches(PyExc_RecursionError) && !PyErr_ExceptionMatches(PyExc_MemoryError))
        return -1; /* raised by a handler meanwhile */
    Py_XDECREF(answer);
    PyErr_Clear();
    return 0;
}

/* An error is set, and another one came before it: that becomes the context, as in an except clause of Python. */
RARE static void
set_context(PyObject *type, PyObject *value, PyObject *traceback)
{
    PyObject *newer_type, *newer, *newer_traceback;
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyErr_Fetch(&newer_type, &newer, &newer_traceback);
    PyErr_NormalizeException(&newer_type, &newer, &newer_traceback);
    if (newer != value)
        PyException_SetContext(newer, Py_NewRef(value));
    PyErr_Restore(newer_type, newer, newer_traceback);
    Py_DECREF(type);
    Py_DECREF(value);
    Py_XDECREF(traceback);
}

/* Call back into Python, from wherever the program is. An error that is on its way already stays. -1 with an error set
   where the script's code raised meanwhile, otherwise 0, and a new reference or NULL. */
RARE static int
call_back(PyObject *function, PyObject *argument, PyObject **result)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    *result = argument == NULL ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument);
    if (*result == NULL && clear_own_error() < 0) {
        if (type != NULL)
            set_context(type, value, traceback);
        return -1;
    }
    PyErr_Restore(type, value, traceback);
    return 0;
}

RARE static int
notify(PyObject *callback)
{
    PyObject *result;
    if (callback == NULL || callback == Py_None)
        return 0;
    Py_INCREF(callback);
    int raised = call_back(callback, NULL, &result);
    Py_DECREF(callback);
    Py_XDECREF(result);
    return raised;
}

HOT static void
append(Tape *tape, int64_t time, int code, int64_t argument)
{
    Event *event = &tape->events[tape->written++ & tape->mask];
    event->time = time;
    event->word = (int64_t)((uint64_t)argument << ARGUMENT_SHIFT) | code;
}

RARE static int
write_ticket(Tape *tape, int64_t time)
{
    PyObject *ticket, *function = tape->ticket;
    if (function == NULL)
        return 0;
    Py_INCREF(function);
    int raised = call_back(function, NULL, &ticket);
    Py_DECREF(function);
    append(tape, time, tape->ticket_code, ticket != NULL && PyLong_Check(ticket) ? PyLong_AsLong(ticket) + 1 : 0);
    Py_XDECREF(ticket);
    return raised;
}

static inline int
is_full(const Tape *tape)
{
    return tape->written - tape->read + MAX_PER_EVENT > tape->mask + 1;
}

/* Find out anew until when it is calm. */
static void
look_ahead(Tape *tape)
{
    int busy = tape->on_event != NULL || tape->ticket != NULL || tape->quiet < MAX_PER_EVENT;
    tape->calm = busy ? 0 : tape->read + tape->quiet - MAX_PER_EVENT + 1;
}

/* Room is low, or there is none: say so, once, and have room made when there is none; whether there is then. */
RARE static int
look_for_room(Tape *tape, int *raised)
{
    if (!is_full(tape)) {
        tape->quiet = tape->mask + 1;
        look_ahead(tape);
        *raised = notify(tape->on_low);
        return 1;
    }
    *raised = notify(tape->on_full);
    if (!is_full(tape))
        return 1;
    tape->lost++;
    return 0;
}

/* Write an event where something else is to be done as well. */
RARE static int
put_with_care(Tape *tape, int64_t time, int code, int64_t argument)
{
    int raised = 0;
    if (tape->written - tape->read + MAX_PER_EVENT > tape->quiet && !look_for_room(tape, &raised))
        return raised;
    raised |= write_ticket(tape, time);
    append(tape, time, code, argument);
    return tape->on_event == NULL ? raised : raised | notify(tape->on_event);
}

/* Write an event of a moment; -1 with an error set where the script's code raised meanwhile. */
HOT __attribute__((noinline)) static int
put_at(Tape *tape, int64_t time, int code, int64_t argument)
{
    if (tape->written >= tape->calm)
        return put_with_care(tape, time, code, argument);
    append(tape, time, code, argument);
    return 0;
}

/* The same of this moment. */
HOT __attribute__((noinline)) static int
put(Tape *tape, int code, int64_t argument)
{
    return put_at(tape, now(), code, argument);
}

/* What was begun does not take place, as the script raised meanwhile: end it. Returns NULL. */
RARE static PyObject *
end_at_once(Tape *tape, int code, int64_t argument)
{
    if (is_full(tape))
        tape->lost++;
    else
        append(tape, now(), code, argument);
    return NULL;
}

HOT static inline int
here(const Tape *tape)
{
    return tape->thread == THIS_THREAD();
}

HOT static inline int
is_muted(const Tape *tape, int code)
{
    return (int)(tape->muted >> code & 1);
}

/* Tape */

static PyObject *
tape_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", "ticket_code", NULL};
    unsigned long long capacity;
    int ticket_code = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K|i", names, &capacity, &ticket_code))
        return NULL;
    if (capacity < 2 * MAX_PER_EVENT) {
        PyErr_SetString(PyExc_ValueError, "a tape holds at least 4 events");
        return NULL;
    }
    if (capacity & (capacity - 1)) {
        PyErr_SetString(PyExc_ValueError, "a tape holds a power of two of events");
        return NULL;
    }
    Tape *tape = (Tape *)type->tp_alloc(type, 0);
    if (tape == NULL)
        return NULL;
    tape->events = PyMem_Calloc(capacity, sizeof(Event));
    if (tape->events == NULL) {
        Py_DECREF(tape);
        return PyErr_NoMemory();
    }
    tape->mask = capacity - 1;
    tape->quiet = capacity / 2;
    look_ahead(tape);
    tape->ticket_code = ticket_code;
    tape->thread = THIS_THREAD();
    return (PyObject *)tape;
}

static int
tape_traverse(Tape *tape, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(tape));
    Py_VISIT(tape->on_event);
    Py_VISIT(tape->on_low);
    Py_VISIT(tape->on_full);
    Py_VISIT(tape->ticket);
    return 0;
}

static int
tape_clear(Tape *tape)
{
    Py_CLEAR(tape->on_event);
    Py_CLEAR(tape->on_low);
    Py_CLEAR(tape->on_full);
    Py_CLEAR(tape->ticket);
    return 0;
}

static void
tape_dealloc(Tape *tape)
{
    PyTypeObject *type = Py_TYPE(tape);
    PyObject_GC_UnTrack(tape);
    tape_clear(tape);
    PyMem_Free(tape->events);
    type->tp_free(tape);
    Py_DECREF(type);
}

static Py_ssize_t
tape_length(Tape *tape)
{
    return (Py_ssize_t)(tape->written - tape->read);
}

static int
parse_event(PyObject *const *args, Py_ssize_t count, int *code, int64_t *argument)
{
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "an event is a code and perhaps an argument");
        return -1;
    }
    *code = (int)PyLong_AsLong(args[0]);
    *argument = count > 1 ? PyLong_AsLongLong(args[1]) : 0;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
tape_mark(Tape *tape, PyObject *const *args, Py_ssize_t count)
{
    int code;
    int64_t argument;
    if (!here(tape))
        Py_RETURN_FALSE;
    if (parse_event(args, count, &code, &argument) < 0)
        return NULL;
    if (put(tape, code, argument) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *
tape_write(Tape *tape, PyObject *const *args, Py_ssize_t count)
{
    int code;
    int64_t argument;
    if (parse_event(args, count, &code, &argument) < 0)
        return NULL;
    if (put(tape, code, argument) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
tape_here(Tape *tape, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(here(tape));
}

static PyObject *
tape_peek(Tape *tape, PyObject *Py_UNUSED(none))
{
    uint64_t count = tape->written - tape->read, first = tape->read & tape->mask;
    uint64_t until_end = tape->mask + 1 - first, ahead = count < until_end ? count : until_end;
    PyObject *events = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(Event)));
    if (events == NULL)
        return NULL;
    Event *target = (Event *)PyBytes_AS_STRING(events);
    memcpy(target, tape->events + first, ahead * sizeof(Event));
    memcpy(target + ahead, tape->events, (count - ahead) * sizeof(Event));
    return events;
}

static PyObject *
tape_skip(Tape *tape, PyObject *argument)
{
    uint64_t count = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (count > tape->written - tape->read) {
        PyErr_SetString(PyExc_ValueError, "there are not so many events on the tape");
        return NULL;
    }
    tape->read += count;
    tape->quiet = (tape->mask + 1) / 2;
    look_ahead(tape);
    Py_RETURN_NONE;
}

static PyMethodDef tape_methods[] = {
    {"mark", (PyCFunction)(void (*)(void))tape_mark, METH_FASTCALL,
     "Write an event if this is the thread that is followed; return whether it is."},
    {"write", (PyCFunction)(void (*)(void))tape_write, METH_FASTCALL,
     "Write an event, whatever the thread."},
    {"here", (PyCFunction)tape_here, METH_NOARGS, "Return whether this is the thread that is followed."},
    {"peek", (PyCFunction)tape_peek, METH_NOARGS,
     "Return all events on the tape: pairs of native int64, a time and argument << 8 | code."},
    {"skip", (PyCFunction)tape_skip, METH_O, "Take so many events off the tape, the oldest."},
    {NULL, NULL, 0, NULL}};

/* What there is to call, of the place in a tape that the closure tells; None where there is nothing. */
static PyObject *
tape_callback(PyObject *tape, void *place)
{
    PyObject *function = *(PyObject **)((char *)tape + (size_t)place);
    return Py_NewRef(function == NULL ? Py_None : function);
}

static int
tape_call(PyObject *tape, PyObject *function, void *place)
{
    PyObject **there = (PyObject **)((char *)tape + (size_t)place), *before = *there;
    *there = function == Py_None ? NULL : Py_XNewRef(function);
    look_ahead((Tape *)tape);
    Py_XDECREF(before);
    return 0;
}

static PyObject *
tape_thread(PyObject *tape, void *Py_UNUSED(none))
{
    unsigned long thread = ((Tape *)tape)->thread;
    return PyLong_FromUnsignedLong(thread == 0 ? 0 : thread + identifiers_ahead);
}

static int
tape_follow(PyObject *tape, PyObject *identifier, void *Py_UNUSED(none))
{
    unsigned long thread = identifier == NULL ? 0 : PyLong_AsUnsignedLong(identifier);
    if (PyErr_Occurred())
        return -1;
    ((Tape *)tape)->thread = thread == 0 ? 0 : thread - identifiers_ahead;
    return 0;
}

static PyGetSetDef tape_getset[] = {
    {"thread", tape_thread, tape_follow, "The thread that is followed; 0 for none.", NULL},
    {"on_event", tape_callback, tape_call, "Called after every event, unless None.",
     (void *)offsetof(Tape, on_event)},
    {"ticket", tape_callback, tape_call, "Called for a number that precedes each event, unless None.",
     (void *)offsetof(Tape, ticket)},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef tape_members[] = {
    {"steps_open", T_LONG, offsetof(Tape, steps_open), 0, "Optimizer steps at work; kept by the hooks."},
    {"muted", T_ULONGLONG, offsetof(Tape, muted), 0, "Codes, as bits, whose calls go unnoticed."},
    {"lost", T_ULONGLONG, offsetof(Tape, lost), READONLY, "Events for which there was no room."},
    {"on_low", T_OBJECT, offsetof(Tape, on_low), 0, "Called when room is low, unless None."},
    {"on_full", T_OBJECT, offsetof(Tape, on_full), 0, "Called to make room, unless None."},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot tape_slots[] = {
    {Py_tp_doc, "Events of one thread, in a ring of fixed size."},
    {Py_tp_new, tape_new},
    {Py_tp_dealloc, tape_dealloc},
    {Py_tp_traverse, tape_traverse},
    {Py_tp_clear, tape_clear},
    {Py_tp_methods, tape_methods},
    {Py_tp_getset, tape_getset},
    {Py_tp_members, tape_members},
    {Py_mp_length, tape_length},
    {0, NULL}};

static PyType_Spec tape_spec = {"torchperfd.tape._native.Tape", sizeof(Tape), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tape_slots};

static PyTypeObject *tape_type;

/* Timed and Draws: a function or method between two events */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Tape *tape;
    PyObject *original;
    int begin, end, failed;
    /* Of Draws alone. */
    char watching;
    PyObject *plain, *tensor, *ahead, *exhausted, *samples_in, *grad_enabled, *models;
    /* Of both. */
    PyObject *dict;
} Timed;

static int
timed_traverse(Timed *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->dict);
    Py_VISIT(self->tape);
    Py_VISIT(self->original);
    Py_VISIT(self->plain);
    Py_VISIT(self->tensor);
    Py_VISIT(self->ahead);
    Py_VISIT(self->exhausted);
    Py_VISIT(self->samples_in);
    Py_VISIT(self->grad_enabled);
    Py_VISIT(self->models);
    return 0;
}

static int
timed_clear(Timed *self)
{
    Py_CLEAR(self->dict);
    Py_CLEAR(self->tape);
    Py_CLEAR(self->original);
    Py_CLEAR(self->plain);
    Py_CLEAR(self->tensor);
    Py_CLEAR(self->ahead);
    Py_CLEAR(self->exhausted);
    Py_CLEAR(self->samples_in);
    Py_CLEAR(self->grad_enabled);
    Py_CLEAR(self->models);
    return 0;
}

static void
timed_dealloc(Timed *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    timed_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

HOT static PyObject *
timed_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    if (object == NULL || object == Py_None) {
        Py_INCREF(self);
        return self;
    }
    return PyMethod_New(self, object);
}

/* As a function is: by name. What wraps a function takes over its names. */
static PyObject *
timed_reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyObject_GetAttr(self, name_qualname);
}

static PyMethodDef timed_methods[] = {
    {"__reduce__", (PyCFunction)timed_reduce, METH_NOARGS, "Pickle by name."}, {NULL, NULL, 0, NULL}};

static PyObject *
timed_original(PyObject *self, void *Py_UNUSED(none))
{
    return Py_NewRef(((Timed *)self)->original);
}

static int
timed_set_original(PyObject *self, PyObject *original, void *Py_UNUSED(none))
{
    if (original == NULL) {
        PyErr_SetString(PyExc_AttributeError, "original cannot be deleted");
        return -1;
    }
    PyObject *before = ((Timed *)self)->original;
    ((Timed *)self)->original = Py_NewRef(original);
    Py_DECREF(before);
    return 0;
}

static PyGetSetDef timed_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {"original", timed_original, timed_set_original, "What is called between the two events.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef timed_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Timed, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Timed, dict), READONLY, NULL},
    {"watching", T_BOOL, offsetof(Timed, watching), 0, "Whether every draw is announced."},
    {NULL, 0, 0, 0, NULL}};

HOT static PyObject *
timed_vectorcall(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Timed *self = (Timed *)callable;
    Tape *tape = self->tape;
    if (!here(tape) || is_muted(tape, self->begin))
        return PyObject_Vectorcall(self->original, args, nargsf, names);
    if (put(tape, self->begin, 0) < 0)
        return end_at_once(tape, self->failed, 0);
    PyObject *result = PyObject_Vectorcall(self->original, args, nargsf, names);
    if (here(tape) && put(tape, result == NULL ? self->failed : self->end, 0) < 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *
timed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tape", "original", "begin", "end", "failed", NULL};
    PyObject *tape, *original;
    int begin, end, failed = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!Oii|i", names, tape_type, &tape, &original, &begin,
                                     &end, &failed))
        return NULL;
    Timed *self = (Timed *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = timed_vectorcall;
    self->tape = (Tape *)Py_NewRef(tape);
    self->original = Py_NewRef(original);
    self->begin = begin;
    self->end = end;
    self->failed = failed < 0 ? end : failed;
    return (PyObject *)self;
}

/* The length of a plain tensor, from the C type beneath its class: the class itself says it in Python,
   and a shape would have to be made. 0 for a scalar, or where that type says nothing; -1 with an error set where the
   script's code raised meanwhile: a mode of its own may be on. */
HOT static int64_t
tensor_length(const PyTypeObject *tensor, PyObject *part)
{
    const PyTypeObject *base = tensor->tp_base;
    if (base == NULL || base->tp_as_mapping == NULL || base->tp_as_mapping->mp_length == NULL)
        return 0;
    Py_ssize_t length = base->tp_as_mapping->mp_length(part);
    if (length < 0)
        return clear_own_error();
    return length;
}

/* The samples of an unusual batch, as Python counts them. -1 with an error set where a signal handler raised
   meanwhile. */
RARE static int64_t
count_unusual(const Timed *self, PyObject *batch)
{
    int64_t samples = 0;
    PyObject *counted;
    int raised = call_back(self->samples_in, batch, &counted);
    if (counted != NULL && PyLong_Check(counted))
        samples = PyLong_AsLongLong(counted);
    Py_XDECREF(counted);
    if (raised < 0)
        return -1;
    PyErr_Clear(); /* a number too large to be one */
    return samples > 0 ? samples : 0;
}

/* How many samples a batch holds, 0 when unknown; -1 with an error set where the script's code raised meanwhile. Here:
   a tensor, or a list, tuple or dict whose first two parts are tensors that agree. */
HOT static int64_t
count_samples(const Timed *self, PyObject *batch)
{
    PyObject *first = NULL, *second = NULL;
    Py_ssize_t position = 0;
    if ((PyObject *)Py_TYPE(batch) == self->tensor)
        first = batch;
    else if (PyList_CheckExact(batch) && PyList_GET_SIZE(batch) > 1) {
        first = PyList_GET_ITEM(batch, 0);
        second = PyList_GET_ITEM(batch, 1);
    }
    else if (PyTuple_CheckExact(batch) && PyTuple_GET_SIZE(batch) > 1) {
        first = PyTuple_GET_ITEM(batch, 0);
        second = PyTuple_GET_ITEM(batch, 1);
    }
    else if (PyDict_CheckExact(batch) && PyDict_GET_SIZE(batch) > 1) {
        PyDict_Next(batch, &position, NULL, &first);
        PyDict_Next(batch, &position, NULL, &second);
    }
    if (first == NULL || (PyObject *)Py_TYPE(first) != self->tensor)
        return count_unusual(self, batch);
    if (second != NULL && (PyObject *)Py_TYPE(second) != self->tensor)
        return count_unusual(self, batch);
    /* A mode of the script's own may change the batch while a length is asked for. */
    Py_INCREF(first);
    Py_XINCREF(second);
    int64_t samples = tensor_length((PyTypeObject *)self->tensor, first), other = samples;
    if (samples > 0 && second != NULL)
        other = tensor_length((PyTypeObject *)self->tensor, second);
    Py_DECREF(first);
    Py_XDECREF(second);
    if (samples < 0 || other < 0)
        return -1;
    return samples > 0 && samples == other ? samples : count_unusual(self, batch);
}

/* Whether a module is in training mode; -1 with an error set where it does not say. */
HOT static int
is_training(PyObject *module)
{
    /* In its own dict, but for a compiled module: that passes on another's. */
    PyObject **own = _PyObject_GetDictPtr(module);
    PyObject *flag = own == NULL || *own == NULL ? NULL : PyDict_GetItemWithError(*own, name_training);
    if (flag != NULL)
        Py_INCREF(flag);
    else if (!PyErr_Occurred())
        flag = PyObject_GetAttr(module, name_training);
    int training = flag == NULL ? -1 : is_true(flag);
    Py_XDECREF(flag);
    return training;
}

/* What a draw says of evaluation, see DRAW_... in events.py: what cannot be asked is training. -1 with an error set
   where the script's code raised meanwhile. */
HOT static int64_t
evaluation_flags(const Timed *self)
{
    int64_t flags = 0;
    int found = 0;
    PyObject *flag = PyObject_CallNoArgs(self->grad_enabled);
    if (flag == Py_False)
        flags = DRAW_WITHOUT_GRADIENTS;
    Py_XDECREF(flag);
    if (flag == NULL && clear_own_error() < 0)
        return -1;
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(self->models); number++) {
        PyObject *reference = PyList_GET_ITEM(self->models, number);
        PyObject *module = PyWeakref_CheckRef(reference) ? referent(reference) : NULL;
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

/* Whether a draw that may be another's is to be timed; -1 with an error set where a signal handler raised. */
RARE static int
announce(const Timed *self, PyObject *iterator)
{
    PyObject *announced;
    int raised = call_back(self->ahead, iterator, &announced);
    int timed = announced == Py_True;
    Py_XDECREF(announced);
    return raised < 0 ? -1 : timed;
}

HOT static PyObject *
draws_vectorcall(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Timed *self = (Timed *)callable;
    Tape *tape = self->tape;
    if (!here(tape) || PyVectorcall_NARGS(nargsf) != 1)
        return PyObject_Vectorcall(self->original, args, nargsf, names);
    if (self->watching || tape->steps_open || (PyObject *)Py_TYPE(args[0]) != self->plain) {
        int timed = announce(self, args[0]);
        if (timed < 0)
            return NULL;
        if (!timed)
            return PyObject_Vectorcall(self->original, args, nargsf, names);
    }
    else {
        int64_t flags = evaluation_flags(self);
        if (flags < 0 || put(tape, self->begin, (int64_t)(intptr_t)args[0] | flags) < 0)
            return end_at_once(tape, self->failed, (int64_t)(intptr_t)args[0]);
    }
    PyObject *batch = PyObject_Vectorcall(self->original, args, nargsf, names);
    if (batch == NULL) {
        if (put(tape, self->failed, (int64_t)(intptr_t)args[0]) == 0)
            notify(self->exhausted);
        return NULL;
    }
    int64_t samples = count_samples(self, batch);
    if (samples < 0)
        Py_CLEAR(batch);
    if (put(tape, self->end, samples > 0 ? samples : 0) < 0)
        Py_CLEAR(batch);
    return batch;
}

static PyObject *
draws_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tape",  "original", "begin", "end",       "failed",
                            "plain", "tensor",   "ahead", "exhausted", "samples_in", "grad_enabled", "models", NULL};
    PyObject *tape, *original, *plain, *tensor, *ahead, *exhausted, *samples_in, *grad_enabled, *models;
    int begin, end, failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OiiiOO!OOOOO!", names, tape_type, &tape, &original, &begin,
                                     &end, &failed, &plain, &PyType_Type, &tensor, &ahead, &exhausted, &samples_in,
                                     &grad_enabled, &PyList_Type, &models))
        return NULL;
    Timed *self = (Timed *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = draws_vectorcall;
    self->tape = (Tape *)Py_NewRef(tape);
    self->original = Py_NewRef(original);
    self->begin = begin;
    self->end = end;
    self->failed = failed;
    self->watching = 1;
    self->plain = Py_NewRef(plain);
    self->tensor = Py_NewRef(tensor);
    self->ahead = Py_NewRef(ahead);
    self->exhausted = Py_NewRef(exhausted);
    self->samples_in = Py_NewRef(samples_in);
    self->grad_enabled = Py_NewRef(grad_enabled);
    self->models = Py_NewRef(models);
    return (PyObject *)self;
}

#define TIMED_SLOTS                                                                                          \
    {Py_tp_dealloc, timed_dealloc}, {Py_tp_traverse, timed_traverse}, {Py_tp_clear, timed_clear},            \
        {Py_tp_call, PyVectorcall_Call}, {Py_tp_descr_get, timed_get}, {Py_tp_methods, timed_methods},       \
        {Py_tp_getset, timed_getset}, {Py_tp_members, timed_members}

#define TIMED_FLAGS                                                                                          \
    (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR)

static PyType_Slot timed_slots[] = {
    {Py_tp_doc, "A function or method between two events."}, {Py_tp_new, timed_new}, TIMED_SLOTS, {0, NULL}};

static PyType_Slot draws_slots[] = {
    {Py_tp_doc, "The __next__ of an iterator over batches, between two events."},
    {Py_tp_new, draws_new},
    TIMED_SLOTS,
    {0, NULL}};

static PyType_Spec timed_spec = {"torchperfd.tape._native.Timed", sizeof(Timed), 0, TIMED_FLAGS, timed_slots};
static PyType_Spec draws_spec = {"torchperfd.tape._native.Draws", sizeof(Timed), 0, TIMED_FLAGS, draws_slots};

/* Forward: the call of one module, between two events */

typedef struct {
    PyObject_HEAD
    Tape *tape;
    PyObject *module;   /* weakly: in the module's own dict this must not keep it alive */
    PyObject *compiled; /* what stood in this place before, or NULL */
    PyObject *grad_enabled;
    Remembered call_impl;
    int train, evaluate, end;
} Forward;

static int
forward_traverse(Forward *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->tape);
    Py_VISIT(self->module);
    Py_VISIT(self->compiled);
    Py_VISIT(self->grad_enabled);
    Py_VISIT(self->call_impl.found);
    return 0;
}

static int
forward_clear(Forward *self)
{
    Py_CLEAR(self->tape);
    Py_CLEAR(self->module);
    Py_CLEAR(self->compiled);
    Py_CLEAR(self->grad_enabled);
    self->call_impl.version = 0;
    Py_CLEAR(self->call_impl.found);
    return 0;
}

static void
forward_dealloc(Forward *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    forward_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
forward_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tape", "module", "compiled", "grad_enabled", "train", "evaluate", "end", NULL};
    PyObject *tape, *module, *compiled, *grad_enabled;
    int train, evaluate, end;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOiii", names, tape_type, &tape, &module, &compiled,
                                     &grad_enabled, &train, &evaluate, &end))
        return NULL;
    PyObject *reference = PyWeakref_NewRef(module, NULL);
    if (reference == NULL)
        return NULL;
    Forward *self = (Forward *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(reference);
        return NULL;
    }
    self->tape = (Tape *)Py_NewRef(tape);
    self->module = reference;
    self->compiled = compiled == Py_None ? NULL : Py_NewRef(compiled);
    self->grad_enabled = Py_NewRef(grad_enabled);
    self->train = train;
    self->evaluate = evaluate;
    self->end = end;
    return (PyObject *)self;
}

HOT static PyObject *
forward_module(const Forward *self)
{
    PyObject *module = referent(self->module);
    if (module == NULL)
        PyErr_SetString(PyExc_ReferenceError, "the module whose call was timed is gone");
    return module;
}

/* What there is to say of a call that is not for training, see EVALUATE_... in events.py; TRAINS where it is, -1 with an
   error set where the script's code raised meanwhile. */
HOT static int
evaluation(const Forward *self, PyObject *module)
{
    int training = is_training(module), gradients = -1;
    if (training >= 0) {
        PyObject *flag = PyObject_CallNoArgs(self->grad_enabled);
        gradients = flag == NULL ? -1 : is_true(flag);
        Py_XDECREF(flag);
    }
    if (training < 0 || gradients < 0)
        return clear_own_error() < 0 ? -1 : TRAINS;
    if (training)
        return gradients ? TRAINS : EVALUATE_IN_TRAINING_MODE;
    return gradients ? EVALUATE_WITH_GRADIENTS : 0;
}

/* The same with a compiled module, many arguments, or some by name. */
RARE static PyObject *
call_unusual(const Forward *self, PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *call = self->compiled == NULL ? PyObject_GetAttr(module, name_call_impl) : Py_NewRef(self->compiled);
    PyObject *result = call == NULL ? NULL : PyObject_Call(call, args, kwargs);
    Py_XDECREF(call);
    return result;
}

/* Call what was in this place before, or else the module's own implementation. */
HOT static PyObject *
call_module(Forward *self, PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *with_module[1 + MAX_PLAIN_ARGUMENTS];
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (self->compiled != NULL || count > MAX_PLAIN_ARGUMENTS || (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0))
        return call_unusual(self, module, args, kwargs);
    PyObject *call = attribute_of_type(&self->call_impl, module, name_call_impl);
    if (call == NULL)
        return NULL;
    with_module[0] = module;
    for (Py_ssize_t number = 0; number < count; number++)
        with_module[number + 1] = PyTuple_GET_ITEM(args, number);
    PyObject *result = PyObject_Vectorcall(call, with_module, (size_t)count + 1, NULL);
    Py_DECREF(call);
    return result;
}

HOT static PyObject *
forward_call(Forward *self, PyObject *args, PyObject *kwargs)
{
    Tape *tape = self->tape;
    PyObject *module = forward_module(self), *result;
    if (module == NULL)
        return NULL;
    int code = 0, argument = 0, timed = here(tape);
    if (timed) {
        argument = evaluation(self, module);
        if (argument < 0) {
            Py_DECREF(module);
            return NULL;
        }
        code = argument == TRAINS ? self->train : self->evaluate;
        timed = !is_muted(tape, code);
    }
    if (timed && put(tape, code, argument == TRAINS ? 0 : argument) < 0) {
        Py_DECREF(module);
        return end_at_once(tape, self->end, 0);
    }
    result = call_module(self, module, args, kwargs);
    if (timed && here(tape) && put(tape, self->end, 0) < 0)
        Py_CLEAR(result);
    Py_DECREF(module);
    return result;
}

/* Where a module is copied or pickled together with its dict, the copy has nothing in this place. */
static PyObject *
forward_reduce(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("O()", (PyObject *)Py_TYPE(Py_None));
}

static PyMethodDef forward_methods[] = {
    {"__reduce__", (PyCFunction)forward_reduce, METH_NOARGS, "Pickle as None."}, {NULL, NULL, 0, NULL}};

static PyType_Slot forward_slots[] = {{Py_tp_doc, "The call of one module, between two events."},
                                      {Py_tp_new, forward_new},
                                      {Py_tp_dealloc, forward_dealloc},
                                      {Py_tp_traverse, forward_traverse},
                                      {Py_tp_clear, forward_clear},
                                      {Py_tp_call, forward_call},
                                      {Py_tp_methods, forward_methods},
                                      {0, NULL}};

static PyType_Spec forward_spec = {"torchperfd.tape._native.Forward", sizeof(Forward), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, forward_slots};

/* Steps: begins and ends of optimizer steps */

typedef struct {
    PyObject_HEAD
    Tape *tape;
    PyObject *known;  /* weak references by id */
    PyObject *newest; /* the one of them that was asked for last, or NULL */
    int begin, end;
} Steps;

static int
steps_traverse(Steps *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->tape);
    Py_VISIT(self->known);
    Py_VISIT(self->newest);
    return 0;
}

static int
steps_clear(Steps *self)
{
    Py_CLEAR(self->tape);
    Py_CLEAR(self->known);
    Py_CLEAR(self->newest);
    return 0;
}

static void
steps_dealloc(Steps *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    steps_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tape", "known", "begin", "end", NULL};
    PyObject *tape, *known;
    int begin, end;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!ii", names, tape_type, &tape, &PyDict_Type, &known,
                                     &begin, &end))
        return NULL;
    Steps *self = (Steps *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->tape = (Tape *)Py_NewRef(tape);
    self->known = Py_NewRef(known);
    self->begin = begin;
    self->end = end;
    return (PyObject *)self;
}

HOT static int
refers_to(PyObject *reference, PyObject *object)
{
    PyObject *found = referent(reference);
    Py_XDECREF(found); /* whoever calls holds it */
    return found == object;
}

HOT static int
is_known(Steps *self, PyObject *optimizer)
{
    if (self->newest != NULL && refers_to(self->newest, optimizer))
        return 1;
    PyObject *own = PyLong_FromVoidPtr(optimizer);
    PyObject *reference = own == NULL ? NULL : PyDict_GetItemWithError(self->known, own);
    Py_XDECREF(own);
    if (reference == NULL || !PyWeakref_Check(reference) || !refers_to(reference, optimizer)) {
        PyErr_Clear();
        return 0;
    }
    Py_XSETREF(self->newest, Py_NewRef(reference));
    return 1;
}

HOT static PyObject *
steps_begin(Steps *self, PyObject *optimizer)
{
    Tape *tape = self->tape;
    if (!here(tape) || tape->steps_open || !is_known(self, optimizer))
        Py_RETURN_FALSE;
    int raised = put(tape, self->begin, (int64_t)(intptr_t)optimizer);
    tape->steps_open++; /* as for a step that raises: the next one finds this one open */
    if (raised < 0)
        return NULL;
    Py_RETURN_TRUE;
}

HOT static PyObject *
steps_end(Steps *self, PyObject *optimizer)
{
    Tape *tape = self->tape;
    if (!here(tape))
        Py_RETURN_FALSE;
    if (tape->steps_open > 0)
        tape->steps_open--;
    if (put(tape, self->end, (int64_t)(intptr_t)optimizer) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyMethodDef steps_methods[] = {
    {"begin", (PyCFunction)steps_begin, METH_O,
     "Write that a known optimizer steps, unless another step is at work; return whether that is so."},
    {"end", (PyCFunction)steps_end, METH_O,
     "Write that a step has ended if this is the thread that is followed; return whether it is."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot steps_slots[] = {{Py_tp_doc, "Begins and ends of optimizer steps."},
                                    {Py_tp_new, steps_new},
                                    {Py_tp_dealloc, steps_dealloc},
                                    {Py_tp_traverse, steps_traverse},
                                    {Py_tp_clear, steps_clear},
                                    {Py_tp_methods, steps_methods},
                                    {0, NULL}};

static PyType_Spec steps_spec = {"torchperfd.tape._native.Steps", sizeof(Steps), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, steps_slots};

static PyTypeObject *steps_type;

/* StepHook: what torch calls around every optimizer step */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Steps *steps;
    PyObject *otherwise;
    char ends;
} StepHook;

static int
step_hook_traverse(StepHook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->steps);
    Py_VISIT(self->otherwise);
    return 0;
}

static int
step_hook_clear(StepHook *self)
{
    Py_CLEAR(self->steps);
    Py_CLEAR(self->otherwise);
    return 0;
}

static void
step_hook_dealloc(StepHook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    step_hook_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

HOT static PyObject *
step_hook_vectorcall(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *Py_UNUSED(names))
{
    StepHook *self = (StepHook *)callable;
    if (PyVectorcall_NARGS(nargsf) < 1) {
        PyErr_SetString(PyExc_TypeError, "a step has an optimizer");
        return NULL;
    }
    PyObject *told = self->ends ? steps_end(self->steps, args[0]) : steps_begin(self->steps, args[0]);
    int raised = told == NULL ? -1 : 0;
    if (told == Py_False) {
        PyObject *result;
        raised = call_back(self->otherwise, args[0], &result);
        Py_XDECREF(result);
    }
    Py_XDECREF(told);
    if (raised < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
step_hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"steps", "ends", "otherwise", NULL};
    PyObject *steps, *otherwise;
    int ends;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!pO", names, steps_type, &steps, &ends, &otherwise))
        return NULL;
    StepHook *self = (StepHook *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = step_hook_vectorcall;
    self->steps = (Steps *)Py_NewRef(steps);
    self->otherwise = Py_NewRef(otherwise);
    self->ends = (char)ends;
    return (PyObject *)self;
}

/* Dynamo calls nothing that it traces: it looks up `__call__` and goes on with the function it finds.
   That one is put here past the type's own way of setting attributes, which would put it into the
   slot as well, and have the interpreter call it instead of us. */
static PyObject *
step_hook_trace_as(PyObject *type, PyObject *function)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *names = PyType_GetDict((PyTypeObject *)type);
#else
    PyObject *names = Py_XNewRef(((PyTypeObject *)type)->tp_dict);
#endif
    int failed = names == NULL || PyDict_SetItemString(names, "__call__", function) < 0;
    Py_XDECREF(names);
    PyType_Modified((PyTypeObject *)type);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef step_hook_methods[] = {
    {"trace_as", (PyCFunction)step_hook_trace_as, METH_O | METH_CLASS,
     "Have dynamo trace this function where a hook is called in what it compiles."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef step_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(StepHook, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot step_hook_slots[] = {{Py_tp_doc, "What torch calls around every optimizer step."},
                                        {Py_tp_new, step_hook_new},
                                        {Py_tp_dealloc, step_hook_dealloc},
                                        {Py_tp_traverse, step_hook_traverse},
                                        {Py_tp_clear, step_hook_clear},
                                        {Py_tp_call, PyVectorcall_Call},
                                        {Py_tp_methods, step_hook_methods},
                                        {Py_tp_members, step_hook_members},
                                        {0, NULL}};

static PyType_Spec step_hook_spec = {"torchperfd.tape._native.StepHook", sizeof(StepHook), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                                     step_hook_slots};

/* The module */

static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    if (kept != NULL)
        *kept = (PyTypeObject *)type; /* for as long as the process lives */
    else
        Py_DECREF(type);
    return 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native",
                                        "The tape and what writes on it.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__native(void)
{
    identifiers_ahead = PyThread_get_thread_ident() - THIS_THREAD();
    name_call_impl = PyUnicode_InternFromString("_call_impl");
    name_qualname = PyUnicode_InternFromString("__qualname__");
    name_training = PyUnicode_InternFromString("training");
    PyObject *interrupts = PyImport_ImportModule("torchperfd.interrupts");
    is_from_script = interrupts == NULL ? NULL : PyObject_GetAttrString(interrupts, "is_from_script");
    Py_XDECREF(interrupts);
    if (is_from_script == NULL)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || name_call_impl == NULL || name_qualname == NULL
        || name_training == NULL || add_type(module, &tape_spec, &tape_type) < 0
        || add_type(module, &timed_spec, NULL) < 0 || add_type(module, &draws_spec, NULL) < 0
        || add_type(module, &forward_spec, NULL) < 0 || add_type(module, &steps_spec, &steps_type) < 0
        || add_type(module, &step_hook_spec, NULL) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
