/* The sound events of a Kineto trace, parsed straight into columns, the nesting of calls, and replays.

   The text is untrusted. This half accepts a batch only if every event in it is sound and plain, and else returns None:
   then kineto.py and loading.py, which read the same in Python, read that batch and name its faults. So nothing here
   repairs, guesses or recurses; each read is bounded by `end`. Only the limited API of CPython is used. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h> /* part of Python.h from 3.12 on */

/* Change it with what Python and C agree on; native_batches.py has the same. */
#define NATIVE_ABI "torchperfd-analysis-abi-2"

/* A part of the text: a string with its quotes, or any other value. Without a text it is absent. */
typedef struct {
    const char *text;
    uint32_t length;
    uint32_t hash;
} Slice;

/* A complete event. */
typedef struct {
    int64_t start, end; /* ns */
    int64_t external, correlation, sequence;
    Slice name, category, process, thread, dims, types;
    Slice args; /* only of a collective */
    uint8_t backward, in_group, unfinished;
    uint8_t use;
} Record;

/* A row; the exporter's event for the whole recording; or an event whose times are no times. */
enum { WANTED, WINDOW, LEFT_OUT };

typedef struct {
    Record *records;
    size_t count, capacity;
    Slice *memory; /* whole events: allocations and frees */
    size_t memory_count, memory_capacity;
    int64_t others;     /* events that are not complete ones */
    int64_t untimed;    /* complete events without a start or a duration */
    int64_t impossible; /* complete events with times that int64 ns cannot hold */
    size_t closed_at;   /* where the bracket is that closes the list */
} Parsed;

/* scan.c: each moves *at past one thing and returns whether it was there and sound. */

typedef struct {
    uint64_t mantissa;
    int fraction; /* decimals */
    int is_negative;
    int is_whole; /* written without a point */
} Number;

enum { HAS_ESCAPE = 1, HAS_NON_ASCII = 2 };

const char *skip_space(const char *at, const char *end);
/* `flags` may be NULL. */
int scan_string(const char **at, const char *end, Slice *found, int *flags);
/* The same, and it is sound Unicode. */
int scan_text(const char **at, const char *end, Slice *found);
/* A number of up to 19 digits without an exponent. */
int scan_number(const char **at, const char *end, Number *found);
int skip_value(const char **at, const char *end);
int skip_word(const char **at, const char *end, const char *word);
uint32_t hash_of(const char *text, size_t length, uint64_t seed);

/* args.c: likewise. */

/* A whole number, or a text or null in its place. */
typedef struct {
    int64_t value; /* -1 for null, and for what int64 cannot hold */
    int is_truthy;
    int is_negative;
    int is_too_large;
    int is_text;
    int is_null;
} Whole;

typedef struct {
    Slice all; /* the object */
    int64_t external, legacy_external, correlation, sequence;
    Slice dims, types;
    uint8_t backward, in_group, unfinished, is_collective;
} Args;

extern const Args no_args;

#define IS(slice, literal)                                                                                             \
    ((slice).length == sizeof(literal) + 1 && memcmp((slice).text + 1, literal, sizeof(literal) - 1) == 0)

int is_end_of_value(const char *at, const char *end);
/* A number, or a text in its place; null too if it may be. */
int scan_whole(const char **at, const char *end, int may_be_text, int may_be_null, Whole *found);
/* A key without escapes, and the colon behind it. */
int scan_key(const char **at, const char *end, Slice *key);
/* After a member: whether another follows. -1 for neither a comma nor the end of the object. */
int another_member(const char **at, const char *end);
/* After the brace of an object: whether it is empty, and then past it. */
int is_empty(const char **at, const char *end);
int scan_args(const char **at, const char *end, Args *args);

/* times.c */

/* The double nearest to a number; -1 for negative ones, and *is_sound is 0 where it cannot be had. */
double nearest_double(const Number *number, int *is_sound);
/* The exact start, and a duration as loading.nanoseconds converts it; both in ns. */
int64_t start_ns(const Number *number, double microseconds);
int64_t duration_ns(double microseconds);

/* events.c */

extern uint64_t hash_seed;

/* Parse a list of events; returns 0 if it is none, or not all are sound, and -1 without memory. Needs no GIL. */
int parse_events(const char *text, size_t length, Parsed *parsed);
void free_parsed(Parsed *parsed);

/* interner.c, batch.c, nesting.c and sweep.c */

typedef struct Interner Interner;
extern PyType_Spec interner_spec, batch_spec;
extern PyTypeObject *interner_type, *batch_type; /* as long as the process lives */

/* The number that the callback of an interner gives to a text; -1 with an error set. */
int32_t intern(Interner *interner, const char *text, size_t length, uint32_t hash);

PyObject *parse(PyObject *module, PyObject *text);
PyObject *nest(PyObject *module, PyObject *args);
PyObject *sweep(PyObject *module, PyObject *args);
