/* The arguments of an event: what decoding.Args has, and loading.py takes from it. */

#include "native.h"

/* More digits are refused, in numbers and in texts in their place. */
#define MAX_ID_DIGITS 20
#define MAX_TEXT_DIGITS 18

const Args no_args = {.correlation = -1, .sequence = -1};

int
is_end_of_value(const char *at, const char *end)
{
    return at < end && (*at == ',' || *at == '}' || *at == ']' || *at == ' ' || *at == '\n' || *at == '\r' || *at == '\t');
}

static int
scan_digits(const char **at, const char *end, Whole *found)
{
    const char *here = *at, *first;
    uint64_t value = 0;
    found->is_negative = here < end && *here == '-';
    here += found->is_negative;
    first = here;
    while (here < end && *here >= '0' && *here <= '9' && here - first < MAX_ID_DIGITS)
        value = value * 10 + (uint64_t)(*here++ - '0'); /* may wrap around in the last */
    if (here == first || (*first == '0' && (here - first > 1 || found->is_negative)) || !is_end_of_value(here, end))
        return 0;
    found->is_too_large = here - first == MAX_ID_DIGITS || value > INT64_MAX;
    found->value = found->is_too_large ? -1 : found->is_negative ? -(int64_t)value : (int64_t)value;
    found->is_truthy = value != 0 || found->is_too_large;
    *at = here;
    return 1;
}

/* A number, or a text in its place; null too if it may be. */
int
scan_whole(const char **at, const char *end, int may_be_text, int may_be_null, Whole *found)
{
    Slice text;
    memset(found, 0, sizeof *found);
    if (*at >= end)
        return 0;
    if (**at == '"') {
        found->is_text = found->is_truthy = 1;
        if (!may_be_text || !scan_text(at, end, &text))
            return 0;
        found->is_truthy = text.length > 2;
        return 1;
    }
    if (**at == 'n') {
        found->is_null = 1;
        found->value = -1;
        return may_be_null && skip_word(at, end, "null");
    }
    return scan_digits(at, end, found);
}

/* A number that identifies something: also a text of digits; `none` for negative ones and null. */
static int
scan_identifier(const char **at, const char *end, int may_be_text, int64_t none, int64_t *found)
{
    const char *begin = *at;
    Whole whole;
    if (!scan_whole(at, end, may_be_text, 1, &whole))
        return 0;
    if (whole.is_text) {
        const char *last = *at - 1;
        if (last == begin + 1 || last - begin - 1 > MAX_TEXT_DIGITS)
            return 0;
        for (const char *digit = begin + 1; digit < last; digit++) {
            if (*digit < '0' || *digit > '9')
                return 0;
            whole.value = whole.value * 10 + (*digit - '0');
        }
    }
    *found = whole.value < 0 ? none : whole.value;
    return 1;
}

static int
scan_raw(const char **at, const char *end, Slice *found)
{
    const char *begin = *at;
    if (!skip_value(at, end))
        return 0;
    found->text = begin;
    found->length = (uint32_t)(*at - begin);
    return 1;
}

static int
scan_bounded(const char **at, const char *end, int64_t least, int64_t most)
{
    Whole whole;
    if (!scan_whole(at, end, 0, 0, &whole) || whole.is_too_large)
        return 0;
    return least <= whole.value && whole.value <= most;
}

static int
scan_finished(const char **at, const char *end, uint8_t *unfinished)
{
    Whole whole;
    *unfinished = *at < end && **at == 'f';
    if (*unfinished)
        return skip_word(at, end, "false");
    if (*at < end && **at == 't')
        return skip_word(at, end, "true");
    return scan_whole(at, end, 1, 1, &whole);
}

static int
scan_argument(const char **at, const char *end, Slice key, Args *args)
{
    Whole whole;
    switch (key.length - 2) {
    case 3:
        if (IS(key, "Seq"))
            return scan_whole(at, end, 1, 1, &whole);
        break;
    case 5:
        if (IS(key, "dtype"))
            return scan_whole(at, end, 1, 1, &whole);
        if (IS(key, "Bytes"))
            return scan_bounded(at, end, INT64_MIN, INT64_MAX);
        break;
    case 8:
        if (IS(key, "finished"))
            return scan_finished(at, end, &args->unfinished);
        break;
    case 10:
        if (IS(key, "Input Dims"))
            return scan_raw(at, end, &args->dims);
        if (IS(key, "Input type"))
            return scan_raw(at, end, &args->types);
        break;
    case 11:
        if (IS(key, "External id"))
            return scan_identifier(at, end, 1, 0, &args->external);
        if (IS(key, "external id"))
            return scan_identifier(at, end, 1, 0, &args->legacy_external);
        if (IS(key, "correlation"))
            return scan_identifier(at, end, 1, -1, &args->correlation);
        if (IS(key, "Device Type"))
            return scan_bounded(at, end, INT32_MIN, INT32_MAX);
        break;
    case 13:
        if (IS(key, "In msg nelems"))
            return scan_whole(at, end, 1, 1, &whole);
        if (IS(key, "Fwd thread id")) {
            if (!scan_whole(at, end, 0, 0, &whole))
                return 0;
            args->backward = whole.is_truthy && !whole.is_negative;
            return 1;
        }
        break;
    case 14:
        if (IS(key, "Out msg nelems"))
            return scan_whole(at, end, 1, 1, &whole);
        if (IS(key, "Total Reserved"))
            return scan_bounded(at, end, INT64_MIN, INT64_MAX);
        break;
    case 15:
        if (IS(key, "Sequence number"))
            return scan_identifier(at, end, 0, -1, &args->sequence);
        if (IS(key, "Collective name")) {
            if (!scan_whole(at, end, 1, 1, &whole))
                return 0;
            args->is_collective = (uint8_t)whole.is_truthy;
            return 1;
        }
        break;
    case 18:
        if (IS(key, "Process Group Name")) {
            if (!scan_whole(at, end, 1, 1, &whole))
                return 0;
            args->in_group = whole.is_text ? (uint8_t)whole.is_truthy : !whole.is_null;
            return 1;
        }
        break;
    default:
        break;
    }
    return skip_value(at, end);
}

/* A key without escapes, and the colon behind it. */
int
scan_key(const char **at, const char *end, Slice *key)
{
    int flags;
    if (!scan_string(at, end, key, &flags) || flags & HAS_ESCAPE)
        return 0;
    *at = skip_space(*at, end);
    if (*at >= end || **at != ':')
        return 0;
    *at = skip_space(*at + 1, end);
    return 1;
}

/* After a member: whether another follows. -1 for neither a comma nor the end of the object. */
int
another_member(const char **at, const char *end)
{
    *at = skip_space(*at, end);
    if (*at >= end || (**at != ',' && **at != '}'))
        return -1;
    int another = **at == ',';
    *at = another ? skip_space(*at + 1, end) : *at + 1;
    return another;
}

/* After the brace of an object: whether it is empty, and then past it. */
int
is_empty(const char **at, const char *end)
{
    *at = skip_space(*at, end);
    if (*at >= end || **at != '}')
        return 0;
    ++*at;
    return 1;
}

int
scan_args(const char **at, const char *end, Args *args)
{
    const char *begin = *at;
    *args = no_args;
    if (*at < end && **at == 'n')
        return skip_word(at, end, "null");
    if (*at >= end || **at != '{')
        return 0;
    ++*at;
    int more = !is_empty(at, end);
    while (more) {
        Slice key;
        if (!scan_key(at, end, &key) || !scan_argument(at, end, key, args))
            return 0;
        more = another_member(at, end);
        if (more < 0)
            return 0;
    }
    args->all.text = begin;
    args->all.length = (uint32_t)(*at - begin);
    return 1;
}
