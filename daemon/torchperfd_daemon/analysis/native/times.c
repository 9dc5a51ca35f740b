/* Microseconds to nanoseconds, equal to loading.nanoseconds and Decimal. */

#include "native.h"

static const uint64_t powers[] = {
    1ULL, 10ULL, 100ULL, 1000ULL, 10000ULL, 100000ULL, 1000000ULL, 10000000ULL, 100000000ULL, 1000000000ULL,
    10000000000ULL, 100000000000ULL, 1000000000000ULL, 10000000000000ULL, 100000000000000ULL, 1000000000000000ULL,
    10000000000000000ULL, 100000000000000000ULL, 1000000000000000000ULL,
};
#define MAX_POWER 17
/* Up to here each whole number is a double, and so are the powers of ten: one division rounds once. */
#define MAX_EXACT (1ULL << 53)
/* From here on a double is coarser than a nanosecond; decoding.EXACT_BELOW_US. */
#define EXACT_BELOW_US 8796093022208.0

double
nearest_double(const Number *number, int *is_sound)
{
#ifdef __SIZEOF_INT128__ /* as on all machines with 64 bits, whose doubles are nowhere wider either */
    *is_sound = number->fraction <= MAX_POWER;
    if (!*is_sound || (number->is_negative && number->mantissa != 0))
        return -1.0;
    if (number->mantissa <= MAX_EXACT)
        return (double)number->mantissa / (double)powers[number->fraction];
    if (number->fraction == 0)
        return (double)number->mantissa;
    unsigned __int128 dividend = (unsigned __int128)number->mantissa << 63, divisor = powers[number->fraction];
    unsigned __int128 quotient = dividend / divisor;
    /* At least 59 bits, so that the last can stand for all that are cut off. */
    quotient |= quotient * divisor != dividend;
    return (double)quotient * 0x1p-63;
#else
    *is_sound = 0;
    return -1.0;
#endif
}

/* Round half to even; below 2^51. */
static inline int64_t
rounded(double value)
{
    return (int64_t)(value + 0x1.8p52 - 0x1.8p52);
}

int64_t
duration_ns(double microseconds)
{
    int64_t whole = (int64_t)microseconds;
    return whole * 1000 + rounded((microseconds - (double)whole) * 1000);
}

int64_t
start_ns(const Number *number, double microseconds)
{
    if (microseconds < EXACT_BELOW_US)
        return duration_ns(microseconds);
    if (number->fraction <= 3)
        return (int64_t)(number->mantissa * powers[3 - number->fraction]);
    uint64_t divisor = powers[number->fraction - 3];
    uint64_t whole = number->mantissa / divisor, rest = number->mantissa % divisor;
    whole += rest > divisor / 2 || (rest == divisor / 2 && whole & 1);
    return (int64_t)whole;
}
