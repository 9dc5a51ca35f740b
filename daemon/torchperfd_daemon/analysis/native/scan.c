/* JSON, one value at a time. What is not plain is refused: Python reads it. */

#include "native.h"

/* Deeper values are refused; real ones nest three or four deep. */
#define MAX_DEPTH 64
#define MAX_DIGITS 19

#define ONES 0x0101010101010101ULL
#define HIGHS 0x8080808080808080ULL
#define LITTLE_ENDIAN_BYTES (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)

const char *
skip_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* The high bit of each byte that is zero; of bytes behind the first, perhaps of others as well. */
static inline uint64_t
zero_bytes(uint64_t word)
{
    return (word - ONES) & ~word & HIGHS;
}

static int
is_hex(char digit)
{
    return (digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f') || (digit >= 'A' && digit <= 'F');
}

/* Of the escape whose backslash is at `at`; 0 if it is none. */
static size_t
escape_length(const char *at, const char *end)
{
    if (end - at < 2)
        return 0;
    if (at[1] != 'u')
        return at[1] != '\0' && strchr("\"\\/bfnrt", at[1]) != NULL ? 2 : 0;
    if (end - at < 6 || !is_hex(at[2]) || !is_hex(at[3]) || !is_hex(at[4]) || !is_hex(at[5]))
        return 0;
    /* Halves of surrogate pairs are left to Python. */
    return (at[2] == 'd' || at[2] == 'D') && at[3] >= '8' ? 0 : 6;
}

int
scan_string(const char **at, const char *end, Slice *found, int *flags)
{
    const char *begin = *at, *here = begin + 1;
    int seen = 0;
    if (begin >= end || *begin != '"')
        return 0;
    for (;;) {
        while (end - here >= 8) {
            uint64_t word;
            memcpy(&word, here, 8);
            uint64_t special = zero_bytes(word ^ ONES * '"') | zero_bytes(word ^ ONES * '\\')
                               | ((word - ONES * 0x20) & ~word & HIGHS);
            if (special != 0 && (word & HIGHS || !LITTLE_ENDIAN_BYTES))
                break;
            if (special != 0) {
                /* The lowest bit is exact. */
                here += __builtin_ctzll(special) / 8;
                break;
            }
            if (word & HIGHS)
                seen |= HAS_NON_ASCII;
            here += 8;
        }
        if (here >= end)
            return 0;
        unsigned char byte = (unsigned char)*here;
        if (byte == '"')
            break;
        if (byte == '\\') {
            size_t length = escape_length(here, end);
            if (length == 0)
                return 0;
            seen |= HAS_ESCAPE;
            here += length;
            continue;
        }
        if (byte < 0x20)
            return 0;
        if (byte >= 0x80)
            seen |= HAS_NON_ASCII;
        here++;
    }
    here++;
    if (here - begin > INT32_MAX)
        return 0;
    found->text = begin;
    found->length = (uint32_t)(here - begin);
    if (flags != NULL)
        *flags = seen;
    *at = here;
    return 1;
}

static int
follows(const unsigned char *at, const unsigned char *end, int count)
{
    if (end - at <= count)
        return 0;
    for (int each = 1; each <= count; each++)
        if ((at[each] & 0xC0) != 0x80)
            return 0;
    return 1;
}

static int
is_utf8(const char *text, size_t length)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + length;
    while (at < end) {
        int more;
        if (*at < 0x80)
            more = 0;
        else if (*at >= 0xC2 && *at <= 0xDF)
            more = 1;
        else if (*at >= 0xE0 && *at <= 0xEF)
            more = 2;
        else if (*at >= 0xF0 && *at <= 0xF4)
            more = 3;
        else
            return 0;
        if (!follows(at, end, more))
            return 0;
        /* Longer than needed, a surrogate, or beyond Unicode. */
        if ((*at == 0xE0 && at[1] < 0xA0) || (*at == 0xED && at[1] >= 0xA0) || (*at == 0xF0 && at[1] < 0x90)
            || (*at == 0xF4 && at[1] >= 0x90))
            return 0;
        at += more + 1;
    }
    return 1;
}

int
scan_text(const char **at, const char *end, Slice *found)
{
    int flags;
    if (!scan_string(at, end, found, &flags))
        return 0;
    return !(flags & HAS_NON_ASCII) || is_utf8(found->text, found->length);
}

int
scan_number(const char **at, const char *end, Number *found)
{
    const char *here = *at, *first;
    uint64_t mantissa = 0;
    found->is_negative = here < end && *here == '-';
    here += found->is_negative;
    first = here;
    while (here < end && *here >= '0' && *here <= '9' && here - first < MAX_DIGITS)
        mantissa = mantissa * 10 + (uint64_t)(*here++ - '0');
    if (here == first || (*first == '0' && here - first > 1))
        return 0;
    found->is_whole = 1;
    found->fraction = 0;
    if (here < end && *here == '.') {
        const char *point = here++;
        while (here < end && *here >= '0' && *here <= '9' && here - first <= MAX_DIGITS)
            mantissa = mantissa * 10 + (uint64_t)(*here++ - '0');
        found->fraction = (int)(here - point - 1);
        if (found->fraction == 0)
            return 0;
        found->is_whole = 0;
    }
    /* More digits, or an exponent; a number is never the last of a text. */
    if (here >= end || (*here >= '0' && *here <= '9') || *here == 'e' || *here == 'E' || *here == '.')
        return 0;
    found->mantissa = mantissa;
    *at = here;
    return 1;
}

int
skip_word(const char **at, const char *end, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(end - *at) < length || memcmp(*at, word, length) != 0)
        return 0;
    *at += length;
    return 1;
}

static const char *
skip_digits(const char *at, const char *end)
{
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at;
}

/* Any number that JSON has. */
static int
skip_number(const char **at, const char *end)
{
    const char *here = *at, *first;
    here += here < end && *here == '-';
    first = here;
    here = skip_digits(here, end);
    if (here == first || (*first == '0' && here - first > 1))
        return 0;
    if (here < end && *here == '.') {
        first = ++here;
        here = skip_digits(here, end);
        if (here == first)
            return 0;
    }
    if (here < end && (*here == 'e' || *here == 'E')) {
        here++;
        here += here < end && (*here == '+' || *here == '-');
        first = here;
        here = skip_digits(here, end);
        if (here == first)
            return 0;
    }
    *at = here;
    return 1;
}

static int
skip_scalar(const char **at, const char *end)
{
    Slice ignored;
    if (*at >= end)
        return 0;
    switch (**at) {
    case '"':
        return scan_string(at, end, &ignored, NULL);
    case 't':
        return skip_word(at, end, "true");
    case 'f':
        return skip_word(at, end, "false");
    case 'n':
        return skip_word(at, end, "null");
    default:
        return skip_number(at, end);
    }
}

static int
skip_key(const char **at, const char *end)
{
    Slice ignored;
    if (!scan_string(at, end, &ignored, NULL))
        return 0;
    *at = skip_space(*at, end);
    if (*at >= end || **at != ':')
        return 0;
    *at = skip_space(*at + 1, end);
    return 1;
}

int
skip_value(const char **at, const char *end)
{
    uint64_t objects = 0; /* of the open brackets, the lowest bit for the innermost */
    int depth = 0;
    for (;;) {
        /* A value begins here. */
        if (*at < end && (**at == '{' || **at == '[')) {
            int is_object = **at == '{';
            if (depth == MAX_DEPTH)
                return 0;
            *at = skip_space(*at + 1, end);
            depth++;
            objects = objects << 1 | (uint64_t)is_object;
            if (*at >= end)
                return 0;
            if (**at != (is_object ? '}' : ']')) {
                if (is_object && !skip_key(at, end))
                    return 0;
                continue;
            }
        } else {
            if (!skip_scalar(at, end))
                return 0;
            if (depth == 0)
                return 1;
            *at = skip_space(*at, end);
        }
        /* A value has ended, or an empty object or list is about to. */
        while (*at < end && **at == (objects & 1 ? '}' : ']')) {
            ++*at;
            objects >>= 1;
            if (--depth == 0)
                return 1;
            *at = skip_space(*at, end);
        }
        if (*at >= end || **at != ',')
            return 0;
        *at = skip_space(*at + 1, end);
        if (objects & 1 && !skip_key(at, end))
            return 0;
    }
}

/* Eight bytes at a time. The writer of a file does not know the seed, and cannot choose names that collide. */
uint32_t
hash_of(const char *text, size_t length, uint64_t seed)
{
    uint64_t hash = seed ^ length * 0x9E3779B97F4A7C15ULL;
    while (length >= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0xFF51AFD7ED558CCDULL;
        hash ^= hash >> 32;
        text += 8;
        length -= 8;
    }
    uint64_t rest = 0;
    memcpy(&rest, text, length);
    hash = (hash ^ rest) * 0xC4CEB9FE1A85EC53ULL;
    return (uint32_t)(hash ^ hash >> 29 ^ hash >> 32);
}
