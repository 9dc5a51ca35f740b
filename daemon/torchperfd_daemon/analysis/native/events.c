/* A list of trace events to records: what decoding.Event has, and loading.py takes from it. */

#include "native.h"

/* As in loading.py: beyond these a start or an end would leave int64 nanoseconds. */
#define LATEST_START_US 9007199254740992.0
#define MAX_US 8796093022208.0
/* Longer numbers and names of processes and threads are refused. */
#define MAX_ID_LENGTH 200

uint64_t hash_seed;

typedef struct {
    Slice ph, name, category, process, thread;
    Number start, duration;
    int has_start, has_duration;
    Args args;
} Event;

static int
scan_plain(const char **at, const char *end, Slice *found)
{
    int flags;
    return scan_string(at, end, found, &flags) && flags == 0;
}

static int
scan_id(const char **at, const char *end, Slice *found)
{
    const char *begin = *at;
    Whole whole;
    if (!scan_whole(at, end, 1, 0, &whole) || *at - begin > MAX_ID_LENGTH)
        return 0;
    found->text = begin;
    found->length = (uint32_t)(*at - begin);
    return 1;
}

static int
scan_time(const char **at, const char *end, Number *found, int *has)
{
    *has = 1;
    return scan_number(at, end, found) && is_end_of_value(*at, end);
}

static int
scan_field(const char **at, const char *end, Slice key, Event *event)
{
    switch (key.length - 2) {
    case 2:
        if (IS(key, "ph"))
            return scan_plain(at, end, &event->ph);
        if (IS(key, "ts"))
            return scan_time(at, end, &event->start, &event->has_start);
        break;
    case 3:
        if (IS(key, "cat"))
            return scan_plain(at, end, &event->category);
        if (IS(key, "pid"))
            return scan_id(at, end, &event->process);
        if (IS(key, "tid"))
            return scan_id(at, end, &event->thread);
        if (IS(key, "dur"))
            return scan_time(at, end, &event->duration, &event->has_duration);
        break;
    case 4:
        if (IS(key, "name"))
            return scan_text(at, end, &event->name);
        if (IS(key, "args"))
            return scan_args(at, end, &event->args);
        break;
    default:
        break;
    }
    return skip_value(at, end);
}

static int
scan_event(const char **at, const char *end, Event *event)
{
    memset(event, 0, sizeof *event);
    event->args = no_args;
    if (*at >= end || **at != '{')
        return 0;
    ++*at;
    int more = !is_empty(at, end);
    while (more) {
        Slice key;
        if (!scan_key(at, end, &key) || !scan_field(at, end, key, event))
            return 0;
        more = another_member(at, end);
        if (more < 0)
            return 0;
    }
    return event->ph.text != NULL;
}

/* Room for one more; NULL without memory. */
static void *
grown(void *items, size_t size, size_t count, size_t *capacity)
{
    if (count < *capacity)
        return items;
    size_t wider = *capacity ? *capacity * 2 : 1024;
    void *moved = realloc(items, wider * size);
    if (moved != NULL)
        *capacity = wider;
    return moved;
}

static void
set_hash(Slice *slice)
{
    if (slice->text != NULL)
        slice->hash = hash_of(slice->text, slice->length, hash_seed);
}

/* 1 for an event that was added, 0 for one that Python has to read, -1 without memory. */
static int
add_complete(Parsed *parsed, const Event *event)
{
    int is_start_sound = 1, is_duration_sound = 1;
    double start = event->has_start ? nearest_double(&event->start, &is_start_sound) : -1.0;
    double duration = event->has_duration ? nearest_double(&event->duration, &is_duration_sound) : -1.0;
    if (!is_start_sound || !is_duration_sound || event->name.length <= 2 || event->category.length <= 2)
        return 0;
    Record *records = grown(parsed->records, sizeof(Record), parsed->count, &parsed->capacity);
    if (records == NULL)
        return -1;
    parsed->records = records;
    Record *record = &records[parsed->count++];
    const Args *args = &event->args;
    *record = (Record){
        .external = args->external ? args->external : args->legacy_external,
        .correlation = args->correlation,
        .sequence = args->sequence,
        .name = event->name,
        .category = event->category,
        .process = event->process,
        .thread = event->thread,
        .dims = args->dims,
        .types = args->types,
        .backward = args->backward,
        .in_group = args->in_group,
        .unfinished = args->unfinished,
        .use = IS(event->category, "Trace") || IS(event->category, "trace") ? WINDOW : WANTED,
    };
    if (args->is_collective)
        record->args = args->all;
    set_hash(&record->name);
    set_hash(&record->category);
    set_hash(&record->dims);
    set_hash(&record->types);
    if (start < 0 || duration < 0) {
        parsed->untimed++;
        record->use = LEFT_OUT;
    } else if (start >= LATEST_START_US || duration >= MAX_US) {
        parsed->impossible++;
        record->use = LEFT_OUT;
    } else {
        record->start = start_ns(&event->start, start);
        record->end = record->start + duration_ns(duration);
    }
    return 1;
}

static int
add(Parsed *parsed, const Event *event, const char *begin, const char *until)
{
    if (IS(event->ph, "X"))
        return add_complete(parsed, event);
    parsed->others++;
    if (!IS(event->ph, "i") || event->name.text == NULL)
        return 1;
    if (memchr(event->name.text, '\\', event->name.length) != NULL)
        return 0;
    if (!IS(event->name, "[memory]"))
        return 1;
    Slice *memory = grown(parsed->memory, sizeof(Slice), parsed->memory_count, &parsed->memory_capacity);
    if (memory == NULL)
        return -1;
    parsed->memory = memory;
    memory[parsed->memory_count++] = (Slice){begin, (uint32_t)(until - begin), 0};
    return 1;
}

int
parse_events(const char *text, size_t length, Parsed *parsed)
{
    const char *at = text, *end = text + length;
    if (length == 0 || length > INT32_MAX || *at != '[')
        return 0;
    for (;;) {
        Event event;
        at = skip_space(at + 1, end);
        const char *begin = at;
        if (!scan_event(&at, end, &event))
            return 0;
        int added = add(parsed, &event, begin, at);
        if (added != 1)
            return added;
        at = skip_space(at, end);
        if (at >= end || (*at != ',' && *at != ']'))
            return 0;
        if (*at == ']')
            break;
    }
    parsed->closed_at = (size_t)(at - text);
    return 1;
}

void
free_parsed(Parsed *parsed)
{
    free(parsed->records);
    free(parsed->memory);
}
