/* The ring buffer: the newest events of one thread, in memory of fixed size. */

#include "native.h"
#include <string.h>
#include <time.h>

#define ARGUMENT_SHIFT 8
#define MAX_PER_EVENT 2 /* the event, and one with its CUDA event id */

PyTypeObject *buffer_type;

HOT static int64_t
now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at); /* the clock of time.perf_counter_ns() */
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

HOT static inline void
append(EventBuffer *buffer, int64_t time, int code, int64_t argument)
{
    Event *event = &buffer->events[buffer->written++ & buffer->mask];
    event->time = time;
    event->word = (int64_t)((uint64_t)argument << ARGUMENT_SHIFT) | code;
}

RARE static int
write_cuda_event(EventBuffer *buffer, int64_t time)
{
    PyObject *cuda_event_id, *function = buffer->cuda_event_id;
    if (function == NULL)
        return 0;
    Py_INCREF(function);
    int raised = call_back(function, NULL, &cuda_event_id);
    Py_DECREF(function);
    append(buffer, time, buffer->cuda_event_code, cuda_event_id != NULL && PyLong_Check(cuda_event_id) ? PyLong_AsLong(cuda_event_id) + 1 : 0);
    Py_XDECREF(cuda_event_id);
    return raised;
}

static inline int
is_full(const EventBuffer *buffer)
{
    return buffer->written - buffer->read + MAX_PER_EVENT > buffer->mask + 1;
}

/* Update the number of events up to which put() only has to append. */
static void
set_fast_until(EventBuffer *buffer)
{
    int busy = buffer->on_event != NULL || buffer->cuda_event_id != NULL || buffer->low_mark < MAX_PER_EVENT;
    buffer->fast_until = busy ? 0 : buffer->read + buffer->low_mark - MAX_PER_EVENT + 1;
}

/* Call on_low once when room is low, or on_full when there is none. Returns whether there is room. */
RARE static int
check_room(EventBuffer *buffer, int *raised)
{
    if (!is_full(buffer)) {
        buffer->low_mark = buffer->mask + 1;
        set_fast_until(buffer);
        *raised = notify(buffer->on_low);
        return 1;
    }
    *raised = notify(buffer->on_full);
    if (!is_full(buffer))
        return 1;
    buffer->lost++;
    return 0;
}

/* Write an event that needs a callback, a CUDA event id or room. */
RARE static int
put_slow(EventBuffer *buffer, int64_t time, int code, int64_t argument)
{
    int raised = 0;
    if (buffer->written - buffer->read + MAX_PER_EVENT > buffer->low_mark && !check_room(buffer, &raised))
        return raised;
    raised |= write_cuda_event(buffer, time);
    append(buffer, time, code, argument);
    return raised | notify(buffer->on_event);
}

HOT int
put(EventBuffer *buffer, int code, int64_t argument)
{
    int64_t time = now();
    if (buffer->written >= buffer->fast_until)
        return put_slow(buffer, time, code, argument);
    append(buffer, time, code, argument);
    return 0;
}

RARE PyObject *
end_at_once(EventBuffer *buffer, int code, int64_t argument)
{
    if (is_full(buffer))
        buffer->lost++;
    else
        append(buffer, now(), code, argument);
    return NULL;
}

static PyObject *
buffer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", "cuda_event_code", NULL};
    unsigned long long capacity;
    int cuda_event_code = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K|i", names, &capacity, &cuda_event_code))
        return NULL;
    if (capacity < 2 * MAX_PER_EVENT || capacity & (capacity - 1)) {
        PyErr_SetString(PyExc_ValueError, capacity < 2 * MAX_PER_EVENT ? "capacity must be at least 4 events"
                                                                       : "capacity must be a power of two");
        return NULL;
    }
    EventBuffer *buffer = (EventBuffer *)PyType_GenericAlloc(type, 0);
    if (buffer == NULL)
        return NULL;
    buffer->events = PyMem_Calloc(capacity, sizeof(Event));
    if (buffer->events == NULL) {
        Py_DECREF(buffer);
        return PyErr_NoMemory();
    }
    buffer->mask = capacity - 1;
    buffer->low_mark = capacity / 2;
    set_fast_until(buffer);
    buffer->cuda_event_code = cuda_event_code;
    buffer->thread = PyThread_get_thread_ident();
    return (PyObject *)buffer;
}

static int
buffer_traverse(EventBuffer *buffer, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)buffer));
    Py_VISIT(buffer->on_event);
    Py_VISIT(buffer->on_low);
    Py_VISIT(buffer->on_full);
    Py_VISIT(buffer->cuda_event_id);
    return 0;
}

static int
buffer_clear(EventBuffer *buffer)
{
    Py_CLEAR(buffer->on_event);
    Py_CLEAR(buffer->on_low);
    Py_CLEAR(buffer->on_full);
    Py_CLEAR(buffer->cuda_event_id);
    return 0;
}

static void
buffer_dealloc(EventBuffer *buffer)
{
    PyTypeObject *type = Py_TYPE((PyObject *)buffer);
    PyObject_GC_UnTrack(buffer);
    buffer_clear(buffer);
    PyMem_Free(buffer->events);
    PyObject_GC_Del(buffer);
    Py_DECREF(type);
}

static Py_ssize_t
buffer_length(EventBuffer *buffer)
{
    return (Py_ssize_t)(buffer->written - buffer->read);
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
buffer_mark(EventBuffer *buffer, PyObject *const *args, Py_ssize_t count)
{
    int code;
    int64_t argument;
    if (!here(buffer))
        Py_RETURN_FALSE;
    if (parse_event(args, count, &code, &argument) < 0 || put(buffer, code, argument) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *
buffer_write(EventBuffer *buffer, PyObject *const *args, Py_ssize_t count)
{
    int code;
    int64_t argument;
    if (parse_event(args, count, &code, &argument) < 0 || put(buffer, code, argument) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
buffer_here(EventBuffer *buffer, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(here(buffer));
}

static PyObject *
buffer_peek(EventBuffer *buffer, PyObject *Py_UNUSED(none))
{
    uint64_t count = buffer->written - buffer->read, first = buffer->read & buffer->mask;
    uint64_t until_end = buffer->mask + 1 - first, ahead = count < until_end ? count : until_end;
    PyObject *events = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(Event)));
    if (events == NULL)
        return NULL;
    Event *target = (Event *)PyBytes_AsString(events);
    memcpy(target, buffer->events + first, ahead * sizeof(Event));
    memcpy(target + ahead, buffer->events, (count - ahead) * sizeof(Event));
    return events;
}

static PyObject *
buffer_skip(EventBuffer *buffer, PyObject *argument)
{
    uint64_t count = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (count > buffer->written - buffer->read) {
        PyErr_SetString(PyExc_ValueError, "the buffer holds fewer events than count");
        return NULL;
    }
    buffer->read += count;
    buffer->low_mark = (buffer->mask + 1) / 2;
    set_fast_until(buffer);
    Py_RETURN_NONE;
}

static PyMethodDef buffer_methods[] = {
    {"mark", (PyCFunction)(void (*)(void))buffer_mark, METH_FASTCALL,
     "Write an event if this is the training thread; return whether it is."},
    {"write", (PyCFunction)(void (*)(void))buffer_write, METH_FASTCALL, "Write an event, whatever the thread."},
    {"here", (PyCFunction)buffer_here, METH_NOARGS, "Return whether this is the training thread."},
    {"peek", (PyCFunction)buffer_peek, METH_NOARGS,
     "Return all events in the buffer: pairs of native int64, a time and argument << 8 | code."},
    {"skip", (PyCFunction)buffer_skip, METH_O, "Remove the count oldest events."},
    {NULL, NULL, 0, NULL}};

/* The callback at this offset, or None. */
static PyObject *
buffer_callback(PyObject *buffer, void *offset)
{
    PyObject *function = *(PyObject **)((char *)buffer + (size_t)offset);
    return Py_NewRef(function == NULL ? Py_None : function);
}

static int
buffer_set_callback(PyObject *buffer, PyObject *function, void *offset)
{
    PyObject **place = (PyObject **)((char *)buffer + (size_t)offset), *before = *place;
    *place = function == Py_None ? NULL : Py_XNewRef(function);
    set_fast_until((EventBuffer *)buffer);
    Py_XDECREF(before);
    return 0;
}

#define CALLBACK(name, doc)                                                                                            \
    {#name, buffer_callback, buffer_set_callback, doc, (void *)offsetof(EventBuffer, name)}

static PyGetSetDef buffer_getset[] = {
    CALLBACK(on_event, "Called after every event, unless None."),
    CALLBACK(on_low, "Called when room is low, unless None."),
    CALLBACK(on_full, "Called to make room, unless None."),
    CALLBACK(cuda_event_id, "Called before each event for its CUDA event id, unless None."),
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef buffer_members[] = {
    {"thread", T_ULONG, offsetof(EventBuffer, thread), 0, "The training thread; 0 for none."},
    {"steps_open", T_LONG, offsetof(EventBuffer, steps_open), 0, "Optimizer steps in progress; updated by the hooks."},
    {"muted", T_ULONGLONG, offsetof(EventBuffer, muted), 0, "Bit mask of codes whose calls are not recorded."},
    {"lost", T_ULONGLONG, offsetof(EventBuffer, lost), READONLY, "Events for which there was no room."},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, "Ring buffer of the events of one thread."},
    {Py_tp_new, buffer_new},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_traverse, buffer_traverse},
    {Py_tp_clear, buffer_clear},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {Py_tp_members, buffer_members},
    {Py_mp_length, buffer_length},
    {0, NULL}};

PyType_Spec buffer_spec = {"torchperfd.events._native.EventBuffer", sizeof(EventBuffer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                         buffer_slots};
