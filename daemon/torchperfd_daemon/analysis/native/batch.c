/* A parsed batch, and its columns. */

#include "native.h"

typedef struct {
    PyObject_HEAD
    Py_buffer buffer; /* what the slices point into */
    Parsed parsed;
    long long rows;
    int64_t recorded_until; /* the latest end of the exporter's windows */
} Batch;

PyTypeObject *batch_type;

PyObject *
parse(PyObject *module, PyObject *text)
{
    Batch *self = (Batch *)PyType_GenericAlloc(batch_type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(text, &self->buffer, PyBUF_SIMPLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    int is_sound;
    Py_BEGIN_ALLOW_THREADS
    is_sound = parse_events(self->buffer.buf, (size_t)self->buffer.len, &self->parsed);
    Py_END_ALLOW_THREADS
    if (is_sound < 1) {
        Py_DECREF(self);
        return is_sound < 0 ? PyErr_NoMemory() : Py_NewRef(Py_None);
    }
    for (size_t at = 0; at < self->parsed.count; at++) {
        const Record *record = &self->parsed.records[at];
        self->rows += record->use == WANTED;
        if (record->use == WINDOW && record->end > self->recorded_until)
            self->recorded_until = record->end;
    }
    return (PyObject *)self;
}

/* Of a process and a thread, with a comma between them; both are bounded by MAX_ID_LENGTH. */
static int32_t
thread_number(Interner *threads, const Record *record)
{
    char text[512];
    const Slice *parts[] = {&record->process, &record->thread};
    size_t length = 0;
    for (int part = 0; part < 2; part++) {
        Slice slice = *parts[part];
        if (slice.text == NULL)
            slice = (Slice){"0", 1, 0};
        if (slice.length > sizeof text / 2 - 1) {
            PyErr_SetString(PyExc_ValueError, "too long a name of a thread");
            return -1;
        }
        if (part == 1)
            text[length++] = ',';
        memcpy(text + length, slice.text, slice.length);
        length += slice.length;
    }
    return intern(threads, text, length, hash_of(text, length, hash_seed));
}

static int32_t
number_of(Interner *interner, const Slice *slice)
{
    return slice->text == NULL ? 0 : intern(interner, slice->text, slice->length, slice->hash);
}

enum { NAME, CATEGORY, THREAD, SHAPE, TYPE, INTERNERS };
enum { START = INTERNERS, END, EXTERNAL, CORRELATION, SEQUENCE, BACKWARD, IN_GROUP, UNFINISHED, COLUMNS };

static size_t
width_of(int column)
{
    return column < START ? sizeof(int32_t) : column < BACKWARD ? sizeof(int64_t) : 1;
}

/* Fill the columns, with room for all rows; -1 with an error set. */
static int
fill(const Parsed *parsed, PyObject *const *interners, void *const *columns)
{
    size_t row = 0;
    for (size_t at = 0; at < parsed->count; at++) {
        const Record *record = &parsed->records[at];
        int32_t numbers[INTERNERS];
        numbers[NAME] = number_of((Interner *)interners[NAME], &record->name);
        numbers[CATEGORY] = number_of((Interner *)interners[CATEGORY], &record->category);
        if (numbers[NAME] < 0 || numbers[CATEGORY] < 0)
            return -1;
        if (record->use != WANTED)
            continue;
        numbers[THREAD] = thread_number((Interner *)interners[THREAD], record);
        numbers[SHAPE] = number_of((Interner *)interners[SHAPE], &record->dims);
        numbers[TYPE] = number_of((Interner *)interners[TYPE], &record->types);
        if (numbers[THREAD] < 0 || numbers[SHAPE] < 0 || numbers[TYPE] < 0)
            return -1;
        for (int column = 0; column < INTERNERS; column++)
            ((int32_t *)columns[column])[row] = numbers[column];
        ((int64_t *)columns[START])[row] = record->start;
        ((int64_t *)columns[END])[row] = record->end;
        ((int64_t *)columns[EXTERNAL])[row] = record->external;
        ((int64_t *)columns[CORRELATION])[row] = record->correlation;
        ((int64_t *)columns[SEQUENCE])[row] = record->sequence;
        ((uint8_t *)columns[BACKWARD])[row] = record->backward;
        ((uint8_t *)columns[IN_GROUP])[row] = record->in_group;
        ((uint8_t *)columns[UNFINISHED])[row] = record->unfinished;
        row++;
    }
    return 0;
}

static PyObject *
batch_columns(PyObject *object, PyObject *args)
{
    Batch *self = (Batch *)object;
    PyObject *interners[INTERNERS], *found = PyTuple_New(COLUMNS);
    void *columns[COLUMNS];
    if (found == NULL
        || !PyArg_ParseTuple(args, "O!O!O!O!O!", interner_type, &interners[NAME], interner_type, &interners[CATEGORY],
                             interner_type, &interners[THREAD], interner_type, &interners[SHAPE], interner_type,
                             &interners[TYPE])) {
        Py_XDECREF(found);
        return NULL;
    }
    for (int column = 0; column < COLUMNS; column++) {
        Py_ssize_t size = (Py_ssize_t)((size_t)self->rows * width_of(column));
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
        if (bytes == NULL || PyTuple_SetItem(found, column, bytes) < 0) {
            Py_DECREF(found);
            return NULL;
        }
        columns[column] = PyBytes_AsString(bytes);
    }
    if (fill(&self->parsed, interners, columns) < 0) {
        Py_DECREF(found);
        return NULL;
    }
    return found;
}

static int
append_text(PyObject *list, Slice slice)
{
    PyObject *bytes = PyBytes_FromStringAndSize(slice.text, slice.length);
    int failed = bytes == NULL || PyList_Append(list, bytes) < 0;
    Py_XDECREF(bytes);
    return failed ? -1 : 0;
}

static PyObject *
batch_memory(PyObject *object, PyObject *ignored)
{
    const Parsed *parsed = &((Batch *)object)->parsed;
    PyObject *list = PyList_New(0);
    for (size_t at = 0; list != NULL && at < parsed->memory_count; at++)
        if (append_text(list, parsed->memory[at]) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *
batch_collectives(PyObject *object, PyObject *ignored)
{
    const Parsed *parsed = &((Batch *)object)->parsed;
    PyObject *rows = PyList_New(0), *args = PyList_New(0);
    long long row = 0;
    for (size_t at = 0; rows != NULL && args != NULL && at < parsed->count; at++) {
        const Record *record = &parsed->records[at];
        if (record->use == WANTED && record->args.text != NULL) {
            PyObject *number = PyLong_FromLongLong(row);
            if (number == NULL || PyList_Append(rows, number) < 0 || append_text(args, record->args) < 0)
                Py_CLEAR(rows);
            Py_XDECREF(number);
        }
        row += record->use == WANTED;
    }
    PyObject *found = rows != NULL && args != NULL ? PyTuple_Pack(2, rows, args) : NULL;
    Py_XDECREF(rows);
    Py_XDECREF(args);
    return found;
}

static PyObject *
batch_counts(PyObject *object, PyObject *ignored)
{
    const Batch *self = (Batch *)object;
    const Parsed *parsed = &self->parsed;
    return Py_BuildValue("LLLLL", self->rows, (long long)parsed->count + (long long)parsed->others,
                         (long long)parsed->untimed, (long long)parsed->impossible, (long long)self->recorded_until);
}

static PyObject *
batch_closed_at(PyObject *object, void *ignored)
{
    return PyLong_FromSize_t(((Batch *)object)->parsed.closed_at);
}

static void
batch_dealloc(PyObject *object)
{
    Batch *self = (Batch *)object;
    PyTypeObject *type = Py_TYPE(object);
    free_parsed(&self->parsed);
    PyBuffer_Release(&self->buffer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"columns", batch_columns, METH_VARARGS, NULL},
    {"memory", batch_memory, METH_NOARGS, NULL},
    {"collectives", batch_collectives, METH_NOARGS, NULL},
    {"counts", batch_counts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {{"closed_at", batch_closed_at, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, batch_dealloc}, {Py_tp_methods, methods}, {Py_tp_getset, attributes}, {0, NULL}};

PyType_Spec batch_spec = {"torchperfd_daemon.analysis._native.Batch", sizeof(Batch), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
