/* Moments of the softplus and its derivatives under N(e, v): the formula of logistic.py, eight rows at a time.

   The lanes of a vector are eight rows, which are put by until there are as many of their kind; what becomes of a row
   does not depend on those in the other lanes.  exp and erfcx are written out, since calls of the library would cost more
   than all the rest. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t whole __attribute__((vector_size(8 * LANES)));

static inline lanes chosen(whole mask, lanes x, lanes y) { return (lanes)((mask & (whole)x) | (~mask & (whole)y)); }

/* NaN stays in both */
static inline lanes at_least(lanes x, double least) { return chosen(x < least, (lanes){0} + least, x); }

static inline lanes at_most(lanes x, double most) { return chosen(x > most, (lanes){0} + most, x); }

static inline int any(whole mask) {
    int64_t found = 0;
    for (int k = 0; k < LANES; k++) found |= mask[k];
    return found != 0;
}

static inline lanes root(lanes x) {
    for (int k = 0; k < LANES; k++) x[k] = __builtin_sqrt(x[k]);
    return x;
}

static const double LOG2E = 1.44269504088896340736, ROUND = 0x1.8p52; /* the last bits of x + ROUND are the whole number next to x */

static inline lanes shifted(lanes k) { return (lanes)((whole)(k + (ROUND + 1023)) << 52); } /* 2^k, k whole */

/* e^x for x <= 0, to rounding also where x is large: 2^r of |r| <= 1/2 by a polynomial, to 1e-15, whose two halves need
   not wait for each other */
static inline lanes power_of_e(lanes x) {
    x = at_least(x, -1400);
    const lanes k = (x * LOG2E + ROUND) - ROUND, most = at_least(k, -1000);
    const lanes r = ((x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10) * LOG2E, z = r * r;
    lanes even = z * 7.054911620801123e-09 + 1.321548679014431e-06, odd = z * 4.4455382718708116e-10 + 1.01780860092397e-07;
    even = even * z + 0.0001540353039338161, odd = odd * z + 1.5252733804059841e-05;
    even = even * z + 0.009618129107628477, odd = odd * z + 0.0013333558146428443;
    even = even * z + 0.24022650695910072, odd = odd * z + 0.05550410866482158;
    even = even * z + 1, odd = odd * z + 0.6931471805599453;
    return (even + odd * r) * shifted(most) * shifted(k - most);
}

/* (1 + 2x) erfcx(x) is smooth in q = (x - K)/(x + K), which is in [-1, 1) for x >= 0.  The polynomial interpolates it at
   the 24 Chebyshev points of q, computed at 50 digits: the relative error is below 1e-16. */
static const double K = 3.75;
static const double ERFCX[24] = {
    1.2375126308378275, -0.14024059858554702, 0.003585415485479575, 0.08227673849014977,
    -0.10880393014246645, 0.09230432116025894, -0.05869339857631061, 0.028362277420377335,
    -0.00974657968596217, 0.001755625843431864, 0.000293714390578856, -0.00029015404203352704,
    5.164649341002877e-05, 2.2384138525656757e-05, -1.1437980374495534e-05, -9.733875167494142e-07,
    1.7419011945194367e-06, -5.741076073013916e-08, -2.4851108650210706e-07, 2.3398534313040898e-08,
    3.195398612057818e-08, -3.798189797736207e-09, -2.618520156503145e-09, 3.2052623379289157e-10,
};

/* erfcx(x) = e^x² erfc(x) for x in [0, 1e150] */
static inline lanes erfcx(lanes x) {
    const lanes up = x + K, twice = 1 + 2 * x, t = 1 / (up * twice), q = (x - K) * twice * t, z = q * q;
    lanes even = (lanes){0} + ERFCX[22], odd = (lanes){0} + ERFCX[23];
    for (int k = 20; k >= 0; k -= 2) even = even * z + ERFCX[k], odd = odd * z + ERFCX[k + 1];
    return (even + odd * q) * (up * t);
}

typedef struct {
    int terms;
    const double *weights, *mean, *variance;
    double *to[5];
} Rows;

/* Whether what lies right of 0 is below e^-45 of what lies left of it, where e^(m + v/2) is the first power's mean */
static inline int is_far(double a, double v) { return v >= 0 && a > v && (a - v) * (a - v) > 90 * v; }

/* Eight rows: the expectations of the softplus and of its first derivatives, whose coefficients are the weights, one
   row after the other.  Far rows have the exponentials alone, until they are below e^-60 of the first. */
static inline void expectations(const Rows *rows, const int orders, const int far, const long *waiting, int count) {
    lanes e, v, out[5];
    for (int k = 0; k < LANES; k++) { /* where they are fewer than eight the last stands for the others too */
        const long i = waiting[k < count ? k : count - 1];
        e[k] = rows->mean[i], v[k] = rows->variance[i];
    }
    const lanes a = at_most(chosen(e < 0, -e, e), DBL_MAX);
    v = at_least(chosen(v <= -1e-12, (lanes){0} + NAN, v), 16 * DBL_MIN);
    const lanes s = root(v), bounded = at_most(s, 1e148);
    const lanes center = at_most(a / bounded * 0.70710678118654752440, 1e149), half = bounded * 0.70710678118654752440;
    const lanes half_density = far ? (lanes){0} : 0.5 * power_of_e(-center * center);
    const lanes below = far ? (lanes){0} : half_density * erfcx(center);
    for (int k = 0; k < orders; k++) out[k] = (lanes){0};
    for (int j = 1; j <= rows->terms; j++) {
        const lanes exponent = at_most(j * (0.5 * j * v - a), 0), x = j * half - center;
        const whole inside = x < 0;
        lanes left = {0}, right = {0};
        if (!far) {
            right = half_density * erfcx(j * half + center);
            left = half_density * erfcx(chosen(inside, -x, x));
            if (any(inside)) left = chosen(inside, power_of_e(exponent) - left, left);
        } else if (any(inside & (exponent > 0.5 * v - a - 60)))
            left = chosen(inside, power_of_e(exponent), left);
        else
            break;
        const lanes sum = left + right, difference = left - right;
        for (int k = 0; k < orders; k++) out[k] += rows->weights[k * rows->terms + j - 1] * (k % 2 ? difference : sum);
    }
    const whole positive = e > 0;
    out[0] += s * half_density * 0.79788456080286535588 - a * below + chosen(positive, e, 0 * e);
    out[1] += below;
    out[1] = chosen(positive, 1 - out[1], out[1]);
    for (int k = 3; k < orders; k += 2) out[k] = chosen(positive, -out[k], out[k]);
    for (int k = 0; k < orders; k++)
        for (int r = 0; r < count; r++) rows->to[k][waiting[r]] = out[k][r];
}

static void flush(const Rows *rows, int orders, int far, const long *waiting, int count) {
    if (orders == 3 && far)
        expectations(rows, 3, 1, waiting, count);
    else if (orders == 3)
        expectations(rows, 3, 0, waiting, count);
    else if (far)
        expectations(rows, 5, 1, waiting, count);
    else
        expectations(rows, 5, 0, waiting, count);
}

/* orders: 3 or 5 of the vectors are written */
void torchngvi_softplus(long count, int orders, int terms, const double *weights, const double *mean,
                        const double *variance, double *value, double *slope, double *curvature, double *third,
                        double *fourth) {
    const Rows rows = {terms, weights, mean, variance, {value, slope, curvature, third, fourth}};
    long waiting[2][LANES];
    int waits[2] = {0};
    for (long i = 0; i < count; i++) {
        const int far = is_far(__builtin_fabs(mean[i]), variance[i]);
        waiting[far][waits[far]++] = i;
        if (waits[far] == LANES) flush(&rows, orders, far, waiting[far], LANES), waits[far] = 0;
    }
    for (int far = 0; far < 2; far++)
        if (waits[far]) flush(&rows, orders, far, waiting[far], waits[far]);
}
