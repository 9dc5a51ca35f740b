/* The recorder's work on steps that all go alike, in C; recorder.py says what it is.

   The loop decides in Python what each event of a step means, once. Here that is done over again to
   the steps after it, without the interpreter's lock: training wants it meanwhile. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_DEPTH 64
#define MAX_SLOTS 64

enum { DONE, ENTER, EXIT, NAME_GAP, COUNT, CLOSE }; /* what cycles.py writes, each with an operand */
enum { INDEX, KIND, START, DURATION, SAMPLES, NS }; /* a row, as in recorder.py; then ns and calls */

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
    int64_t ns[MAX_SLOTS], calls[MAX_SLOTS];
    __int128 squares[MAX_SLOTS];
    int64_t samples;
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

static void
write_row(const Row *row, int slots, int64_t *values, double *squares)
{
    memcpy(values + NS, row->ns, (size_t)slots * sizeof(int64_t));
    memcpy(values + NS + slots, row->calls, (size_t)slots * sizeof(int64_t));
    for (int slot = 0; slot < slots; slot++)
        squares[slot] = (double)row->squares[slot];
}

/* Whether what is to be done keeps within the stack, ends every event, and closes one step. */
static int
is_sound(const uint8_t *deeds, Py_ssize_t size, Py_ssize_t length, const State *state, int slots)
{
    Py_ssize_t events = 0, closes = 0;
    int64_t depth = state->depth;
    if (size % 2 || depth < 0 || depth > MAX_DEPTH)
        return 0;
    for (int64_t inner = 0; inner <= depth; inner++)
        if (state->stack[inner] < 0 || state->stack[inner] >= slots)
            return 0;
    for (Py_ssize_t at = 0; at < size; at += 2) {
        int deed = deeds[at], operand = deeds[at + 1];
        if (deed > CLOSE || ((deed == ENTER || deed == NAME_GAP) && operand >= slots))
            return 0;
        events += deed == DONE;
        closes += deed == CLOSE;
        depth += (deed == ENTER) - (deed == EXIT);
        if (depth < 0 || depth > MAX_DEPTH)
            return 0;
    }
    return events == length && closes == 1 && depth == state->depth && size > 0 && deeds[size - 2] == DONE;
}

static Py_ssize_t
count_alike(const Event *events, Py_ssize_t there, const int64_t *words, const int64_t *masks, Py_ssize_t length)
{
    Py_ssize_t cycles = 0;
    for (; (cycles + 1) * length <= there; cycles++)
        for (Py_ssize_t event = 0; event < length; event++)
            if ((events[cycles * length + event].word & masks[event]) != words[event])
                return cycles;
    return cycles;
}

static void
work(const Event *events, Py_ssize_t cycles, const uint8_t *deeds, Py_ssize_t size, State *state, int slots,
     int other, int64_t index, int64_t ahead, int64_t *values, double *squares)
{
    Py_ssize_t width = NS + 2 * (Py_ssize_t)slots;
    Row row;
    memset(&row, 0, sizeof(row));
    for (Py_ssize_t cycle = 0; cycle < cycles; cycle++) {
        for (Py_ssize_t at = 0; at < size; at += 2) {
            int operand = deeds[at + 1];
            int64_t now = events->time;
            switch (deeds[at]) {
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
                values[INDEX] = index++;
                values[KIND] = operand;
                values[START] = state->start + ahead;
                values[DURATION] = now - state->start;
                values[SAMPLES] = row.samples;
                write_row(&row, slots, values, squares);
                memset(&row, 0, sizeof(row));
                state->last = state->start = now;
                values += width;
                squares += slots;
                break;
            default:
                events++;
            }
        }
    }
}

static PyObject *
repeat(PyObject *module, PyObject *args)
{
    Py_buffer events, words, masks, deeds, state;
    Py_ssize_t most;
    int slots, other;
    long long index, ahead;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*iiLLn", &events, &words, &masks, &deeds, &state, &slots, &other,
                          &index, &ahead, &most))
        return NULL;
    Py_ssize_t length = words.len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t there = events.len / (Py_ssize_t)sizeof(Event);
    if (slots < 1 || slots > MAX_SLOTS || other < 0 || other >= slots || length < 1 || masks.len != words.len
        || state.len != (Py_ssize_t)sizeof(State) || most < 0
        || !is_sound(deeds.buf, deeds.len, length, state.buf, slots)) {
        PyErr_SetString(PyExc_ValueError, "no cycle of events that can be repeated");
        goto done;
    }
    const Event *from = events.buf;
    Py_ssize_t cycles;
    Py_BEGIN_ALLOW_THREADS
    cycles = count_alike(from, there, words.buf, masks.buf, length);
    Py_END_ALLOW_THREADS
    cycles = cycles < most ? cycles : most;
    PyObject *values = PyBytes_FromStringAndSize(NULL, cycles * (NS + 2 * slots) * (Py_ssize_t)sizeof(int64_t));
    PyObject *squares = PyBytes_FromStringAndSize(NULL, cycles * slots * (Py_ssize_t)sizeof(double));
    if (values != NULL && squares != NULL) {
        Py_BEGIN_ALLOW_THREADS
        work(from, cycles, deeds.buf, deeds.len, state.buf, slots, other, index, ahead,
             (int64_t *)PyBytes_AS_STRING(values), (double *)PyBytes_AS_STRING(squares));
        Py_END_ALLOW_THREADS
        answer = Py_BuildValue("nOO", cycles, values, squares);
    }
    Py_XDECREF(values);
    Py_XDECREF(squares);
done:
    PyBuffer_Release(&events);
    PyBuffer_Release(&words);
    PyBuffer_Release(&masks);
    PyBuffer_Release(&deeds);
    PyBuffer_Release(&state);
    return answer;
}

static PyMethodDef functions[] = {
    {"repeat", repeat, METH_VARARGS, "Do to the cycles that are alike what was done to one; see _cycles.pyi."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cycles", "The recorder's work on steps alike.", -1,
                                        functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__cycles(void)
{
    return PyModule_Create(&definition);
}
