/* Tape: the events of one thread, in a ring buffer of fixed size. */

#include "native.h"
#include <string.h>
#include <time.h>

#define ARGUMENT_SHIFT 8
#define MAX_PER_EVENT 2 /* the event, and a ticket for it */

PyTypeObject *tape_type;

HOT static int64_t
now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at); /* the clock of time.perf_counter_ns() */
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

HOT static inline void
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

/* Room is low: announce it once. Or there is none: have some made. Returns whether there is room. */
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

/* Write an event where there is more to do. */
RARE static int
put_with_care(Tape *tape, int64_t time, int code, int64_t argument)
{
    int raised = 0;
    if (tape->written - tape->read + MAX_PER_EVENT > tape->quiet && !look_for_room(tape, &raised))
        return raised;
    raised |= write_ticket(tape, time);
    append(tape, time, code, argument);
    return raised | notify(tape->on_event);
}

HOT int
put(Tape *tape, int code, int64_t argument)
{
    int64_t time = now();
    if (tape->written >= tape->calm)
        return put_with_care(tape, time, code, argument);
    append(tape, time, code, argument);
    return 0;
}

RARE PyObject *
end_at_once(Tape *tape, int code, int64_t argument)
{
    if (is_full(tape))
        tape->lost++;
    else
        append(tape, now(), code, argument);
    return NULL;
}

static PyObject *
tape_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", "ticket_code", NULL};
    unsigned long long capacity;
    int ticket_code = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K|i", names, &capacity, &ticket_code))
        return NULL;
    if (capacity < 2 * MAX_PER_EVENT || capacity & (capacity - 1)) {
        PyErr_SetString(PyExc_ValueError, capacity < 2 * MAX_PER_EVENT ? "a tape holds at least 4 events"
                                                                       : "a tape holds a power of two of events");
        return NULL;
    }
    Tape *tape = (Tape *)PyType_GenericAlloc(type, 0);
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
    tape->thread = PyThread_get_thread_ident();
    return (PyObject *)tape;
}

static int
tape_traverse(Tape *tape, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)tape));
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
    PyTypeObject *type = Py_TYPE((PyObject *)tape);
    PyObject_GC_UnTrack(tape);
    tape_clear(tape);
    PyMem_Free(tape->events);
    PyObject_GC_Del(tape);
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
    if (parse_event(args, count, &code, &argument) < 0 || put(tape, code, argument) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *
tape_write(Tape *tape, PyObject *const *args, Py_ssize_t count)
{
    int code;
    int64_t argument;
    if (parse_event(args, count, &code, &argument) < 0 || put(tape, code, argument) < 0)
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
    Event *target = (Event *)PyBytes_AsString(events);
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
    {"write", (PyCFunction)(void (*)(void))tape_write, METH_FASTCALL, "Write an event, whatever the thread."},
    {"here", (PyCFunction)tape_here, METH_NOARGS, "Return whether this is the thread that is followed."},
    {"peek", (PyCFunction)tape_peek, METH_NOARGS,
     "Return all events on the tape: pairs of native int64, a time and argument << 8 | code."},
    {"skip", (PyCFunction)tape_skip, METH_O, "Take so many events off the tape, the oldest."},
    {NULL, NULL, 0, NULL}};

/* The callback at this offset; None for none. */
static PyObject *
tape_callback(PyObject *tape, void *offset)
{
    PyObject *function = *(PyObject **)((char *)tape + (size_t)offset);
    return Py_NewRef(function == NULL ? Py_None : function);
}

static int
tape_set_callback(PyObject *tape, PyObject *function, void *offset)
{
    PyObject **place = (PyObject **)((char *)tape + (size_t)offset), *before = *place;
    *place = function == Py_None ? NULL : Py_XNewRef(function);
    look_ahead((Tape *)tape);
    Py_XDECREF(before);
    return 0;
}

#define CALLBACK(name, doc)                                                                                            \
    {#name, tape_callback, tape_set_callback, doc, (void *)offsetof(Tape, name)}

static PyGetSetDef tape_getset[] = {
    CALLBACK(on_event, "Called after every event, unless None."),
    CALLBACK(on_low, "Called when room is low, unless None."),
    CALLBACK(on_full, "Called to make room, unless None."),
    CALLBACK(ticket, "Called for a number that precedes each event, unless None."),
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef tape_members[] = {
    {"thread", T_ULONG, offsetof(Tape, thread), 0, "The thread that is followed; 0 for none."},
    {"steps_open", T_LONG, offsetof(Tape, steps_open), 0, "Optimizer steps at work; kept by the hooks."},
    {"muted", T_ULONGLONG, offsetof(Tape, muted), 0, "Codes, as bits, whose calls go unnoticed."},
    {"lost", T_ULONGLONG, offsetof(Tape, lost), READONLY, "Events for which there was no room."},
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

PyType_Spec tape_spec = {"torchperfd.events._native.EventBuffer", sizeof(Tape), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                         tape_slots};
