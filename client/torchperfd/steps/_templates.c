/* Applies a step template to later steps with the same events, as recorder.py would step by step.

   The loop decides in Python, once, what each event of a step means. This module repeats the resulting operations for the
   steps after it. For very many events it releases the GIL, so that training goes on meanwhile. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "../events/native/abi.h"

#define MAX_DEPTH 64
#define MAX_SLOTS 64

/* Releasing the GIL and taking it back delays the training thread: two sleeping threads must be woken up. Fewer events
   than these take about a millisecond, which is less than that delay. */
#define MANY_EVENTS 65536

enum { DONE, ENTER, EXIT, NAME_GAP, COUNT, CLOSE, ARRIVE }; /* written by templates.py, each with an operand */
enum { INDEX, KIND, START, DURATION, SAMPLES, FIXED }; /* columns, followed by ns and calls of each phase */

typedef struct {
    int64_t time;
    int64_t word;
} Event;

typedef struct {
    int64_t last, start, depth;
    int64_t exclusive[MAX_DEPTH + 1];
    int64_t stack[MAX_DEPTH + 1];
} State;

typedef struct {
    int64_t step, first, last;
} Arrival;

typedef struct {
    int64_t ns[MAX_SLOTS], calls[MAX_SLOTS];
    __int128 squares[MAX_SLOTS];
    int64_t index, kind, start, duration, samples;
    __int128 duration_squares; /* of a sum alone */
} Row;

static void
charge(Row *row, int64_t phase, int64_t spent)
{
    row->ns[phase] += spent;
    row->calls[phase]++;
    row->squares[phase] += (__int128)spent * spent;
}

static void
charge_gap(State *state, Row *row, int other)
{
    int64_t spent = state->exclusive[0], phase = state->stack[0];
    state->exclusive[0] = 0;
    if (phase == other)
        row->ns[phase] += spent;
    else
        charge(row, phase, spent);
}

static void
enter_phase(State *state, int64_t now, int phase)
{
    state->exclusive[state->depth] += now - state->last;
    state->last = now;
    state->depth++;
    state->exclusive[state->depth] = 0;
    state->stack[state->depth] = phase;
}

static void
exit_phase(State *state, Row *row, int64_t now)
{
    int64_t spent = state->exclusive[state->depth] + now - state->last, phase = state->stack[state->depth];
    state->last = now;
    state->depth--;
    if (state->stack[state->depth] == phase)
        state->exclusive[state->depth] += spent;
    else
        charge(row, phase, spent);
}

static void
arrive(State *state, int64_t now, int64_t ago, int phase)
{
    int64_t waited = ago < now - state->last ? ago : now - state->last, depth = state->depth;
    enter_phase(state, now, phase);
    state->exclusive[depth] -= waited;
    state->last = now - waited;
}

static void
close_step(State *state, Row *row, int64_t now, int other)
{
    state->exclusive[state->depth] += now - state->last;
    for (int64_t inner = state->depth; inner > 0; inner--) {
        int64_t spent = state->exclusive[inner];
        state->exclusive[inner] = 0;
        if (state->stack[inner - 1] == state->stack[inner])
            state->exclusive[inner - 1] += spent;
        else
            charge(row, state->stack[inner], spent);
    }
    charge_gap(state, row, other);
    row->calls[other] = 1;
    row->squares[other] = (__int128)row->ns[other] * row->ns[other];
    state->stack[0] = other;
}

/* Write a step to its place in every column, add it to the sums, and clear the row. */
static void
write_step(Row *row, const uint8_t *phases, Py_ssize_t count, int64_t *place, Py_ssize_t stride, Row *sum)
{
    place[INDEX * stride] = row->index;
    place[KIND * stride] = row->kind;
    place[START * stride] = row->start;
    place[DURATION * stride] = row->duration;
    place[SAMPLES * stride] = row->samples;
    sum->duration += row->duration;
    sum->samples += row->samples;
    sum->duration_squares += (__int128)row->duration * row->duration;
    place += FIXED * stride;
    for (Py_ssize_t number = 0; number < count; number++) {
        int slot = phases[number];
        place[2 * number * stride] = row->ns[slot];
        place[(2 * number + 1) * stride] = row->calls[slot];
        sum->ns[slot] += row->ns[slot];
        sum->calls[slot] += row->calls[slot];
        sum->squares[slot] += row->squares[slot];
        row->ns[slot] = row->calls[slot] = 0;
        row->squares[slot] = 0;
    }
    row->samples = 0;
}

/* Whether the operations use known phases, stay within the stack, end every event, and close exactly one step. */
static int
is_sound(const uint8_t *ops, Py_ssize_t size, Py_ssize_t length, const State *state, const uint8_t *phases,
         Py_ssize_t count, int other)
{
    char known[256] = {0};
    Py_ssize_t events = 0, closes = 0;
    int64_t depth = state->depth;
    for (Py_ssize_t number = 0; number < count; number++) {
        if (phases[number] >= MAX_SLOTS)
            return 0;
        known[phases[number]] = 1;
    }
    if (other < 0 || other >= MAX_SLOTS || !known[other] || size % 2 || depth < 0 || depth > MAX_DEPTH)
        return 0;
    for (int64_t inner = 0; inner <= depth; inner++)
        if (state->stack[inner] < 0 || state->stack[inner] >= MAX_SLOTS || !known[state->stack[inner]])
            return 0;
    for (Py_ssize_t at = 0; at < size; at += 2) {
        int op = ops[at], operand = ops[at + 1];
        int enters = op == ENTER || op == ARRIVE;
        if (op > ARRIVE || ((enters || op == NAME_GAP) && !known[operand]))
            return 0;
        events += op == DONE;
        closes += op == CLOSE;
        depth += enters - (op == EXIT);
        if (depth < 0 || depth > MAX_DEPTH)
            return 0;
    }
    return events == length && closes == 1 && depth == state->depth && size > 0 && ops[size - 2] == DONE;
}

/* Count the steps at the beginning of the events that match; begun: whether another one begins after them. */
static Py_ssize_t
count_alike(const Event *events, Py_ssize_t there, const int64_t *words, const int64_t *masks, Py_ssize_t length,
            int *begun)
{
    const Event *event = events, *end = events + there;
    for (Py_ssize_t steps = 0;; steps++)
        for (Py_ssize_t at = 0; at < length; at++, event++) {
            *begun = event == end;
            if (*begun || (event->word & masks[at]) != words[at])
                return steps;
        }
}

static void
work(const Event *events, Py_ssize_t steps, const uint8_t *ops, Py_ssize_t size, State *state,
     const uint8_t *phases, Py_ssize_t count, int other, int64_t first, int64_t ahead, int64_t *columns,
     Py_ssize_t stride, Row *sum, Arrival *arrivals)
{
    Row row;
    Arrival arrival = {0};
    memset(&row, 0, sizeof(row));
    for (Py_ssize_t step = 0; step < steps; step++) {
        for (Py_ssize_t at = 0; at < size; at += 2) {
            int operand = ops[at + 1];
            int64_t now = events->time, ago;
            switch (ops[at]) {
            case ENTER:
                enter_phase(state, now, operand);
                break;
            case EXIT:
                exit_phase(state, &row, now);
                break;
            case NAME_GAP:
                charge_gap(state, &row, other);
                state->stack[0] = operand;
                break;
            case COUNT:
                row.samples += events->word >> 8;
                break;
            case CLOSE:
                close_step(state, &row, now, other);
                row.index = first + step;
                row.kind = operand;
                row.start = state->start + ahead;
                row.duration = now - state->start;
                write_step(&row, phases, count, columns + step, stride, sum);
                arrival.step = first + step;
                arrivals[step] = arrival;
                arrival = (Arrival){0};
                state->last = state->start = now;
                break;
            case ARRIVE:
                ago = events->word >> 8;
                arrival.last = now - ago + ahead;
                if (arrival.first == 0)
                    arrival.first = arrival.last;
                arrive(state, now, ago, operand);
                break;
            default:
                events++;
            }
        }
    }
}

static PyObject *
sums(const Row *sum, const uint8_t *phases, Py_ssize_t count)
{
    PyObject *all = PyTuple_New(count + 1);
    if (all == NULL)
        return NULL;
    for (Py_ssize_t number = 0; number <= count; number++) {
        int slot = number < count ? phases[number] : 0;
        PyObject *one = number < count ? Py_BuildValue("LLd", (long long)sum->ns[slot], (long long)sum->calls[slot],
                                                       (double)sum->squares[slot])
                                       : Py_BuildValue("LLd", (long long)sum->duration, (long long)sum->samples,
                                                       (double)sum->duration_squares);
        if (one == NULL) {
            Py_DECREF(all);
            return NULL;
        }
        PyTuple_SetItem(all, number, one);
    }
    return all;
}

static PyObject *
repeat(PyObject *module, PyObject *args)
{
    Py_buffer events, words, masks, ops, state, phases;
    int other;
    long long first, ahead;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*y*iLL", &events, &words, &masks, &ops, &state, &phases, &other,
                          &first, &ahead))
        return NULL;
    Py_ssize_t length = words.len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t there = events.len / (Py_ssize_t)sizeof(Event);
    if (length < 1 || masks.len != words.len || state.len != (Py_ssize_t)sizeof(State)
        || !is_sound(ops.buf, ops.len, length, state.buf, phases.buf, phases.len, other)) {
        PyErr_SetString(PyExc_ValueError, "these operations do not make up one step");
        goto done;
    }
    Py_ssize_t stride = there / length, steps;
    PyObject *columns = PyBytes_FromStringAndSize(NULL, stride * (FIXED + 2 * phases.len) * (Py_ssize_t)sizeof(int64_t));
    PyObject *arrivals = PyBytes_FromStringAndSize(NULL, stride * (Py_ssize_t)sizeof(Arrival));
    if (columns != NULL && arrivals != NULL) {
        Row sum;
        int begun;
        memset(&sum, 0, sizeof(sum));
        PyThreadState *thread = there > MANY_EVENTS ? PyEval_SaveThread() : NULL;
        steps = count_alike(events.buf, there, words.buf, masks.buf, length, &begun);
        work(events.buf, steps, ops.buf, ops.len, state.buf, phases.buf, phases.len, other, first, ahead,
             (int64_t *)PyBytes_AsString(columns), stride, &sum, (Arrival *)PyBytes_AsString(arrivals));
        if (thread != NULL)
            PyEval_RestoreThread(thread);
        PyObject *totals = sums(&sum, phases.buf, phases.len);
        if (totals != NULL)
            answer = Py_BuildValue("nOnOOO", steps, begun ? Py_True : Py_False, stride, columns, totals, arrivals);
        Py_XDECREF(totals);
    }
    Py_XDECREF(columns);
    Py_XDECREF(arrivals);
done:
    PyBuffer_Release(&events);
    PyBuffer_Release(&words);
    PyBuffer_Release(&masks);
    PyBuffer_Release(&ops);
    PyBuffer_Release(&state);
    PyBuffer_Release(&phases);
    return answer;
}

static PyMethodDef functions[] = {
    {"repeat", repeat, METH_VARARGS, "Repeat the operations of one step on the steps like it; see _templates.pyi."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_templates", "Applies step templates.", -1,
                                        functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__templates(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringConstant(module, "ABI", NATIVE_ABI) < 0)
        Py_CLEAR(module);
    return module;
}
