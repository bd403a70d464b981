/* Moments of the softplus under N(e, v): the rules of logistic_rules.py, whose tables come packed in one vector.

   Eight numbers go together, as vectors of the compiler: for Gauss and Hermite eight rows, which are put by until there
   are as many that take the same rule, and for the others eight nodes of one row.  What becomes of a row does not depend
   on those beside it.  exp and log1p are written out: a call of the library costs as much as all the rest. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define TAIL_NODES 24
#define GRIDS 3 /* of the trapezoid rule */
#define RULES (2 + GRIDS) /* for which rows wait */

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t whole __attribute__((vector_size(8 * LANES)));
typedef uint64_t bits __attribute__((vector_size(8 * LANES)));

static inline lanes load(const double *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline double sum(lanes x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

static inline lanes chosen(whole mask, lanes x, lanes y) { return (lanes)((mask & (whole)x) | (~mask & (whole)y)); }

static inline lanes at_least(lanes x, double least) { return chosen(x > least, x, x * 0 + least); }

static const double LOG2E = 1.44269504088896340736, ROUND = 0x1.8p52; /* the last bits of x + ROUND are the whole number next to x */

static inline lanes shifted(lanes k) { return (lanes)((whole)(k + (ROUND + 1023)) << 52); } /* 2^k, k whole */

typedef struct {
    lanes even, odd;
} Series;

/* Of 2^r = even + odd for |r| <= 1/2, to 1e-15: in two halves, so that one need not wait for the other */
static inline Series series(lanes r) {
    const lanes z = r * r;
    lanes even = z * 7.054911620801123e-09 + 1.321548679014431e-06, odd = z * 4.4455382718708116e-10 + 1.01780860092397e-07;
    even = even * z + 0.0001540353039338161, odd = odd * z + 1.5252733804059841e-05;
    even = even * z + 0.009618129107628477, odd = odd * z + 0.0013333558146428443;
    even = even * z + 0.24022650695910072, odd = odd * z + 0.05550410866482158;
    even = even * z + 1, odd = odd * z + 0.6931471805599453;
    return (Series){even, odd * r};
}

/* 2^y for y in [-1022, 1023], or, of deep ones, as far down as one likes */
static inline lanes power_of_two(lanes y, int deep) {
    if (deep) y = at_least(y, -2020);
    const lanes k = (y + ROUND) - ROUND;
    const Series part = series(y - k);
    if (!deep) return (part.even + part.odd) * shifted(k);
    const lanes most = at_least(k, -1000);
    return (part.even + part.odd) * shifted(most) * shifted(k - most);
}

/* e^x for x <= 0, to rounding also where x is large */
static inline lanes power_of_e(lanes x) {
    x = at_least(x, -1400);
    const lanes k = (x * LOG2E + ROUND) - ROUND, most = at_least(k, -1000);
    const lanes r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    const Series part = series(r * LOG2E);
    return (part.even + part.odd) * shifted(most) * shifted(k - most);
}

/* log(1 + x) for x >= 0: the logarithm of a fraction between √½ and √2 as that of (1 + s)/(1 - s), by fdlibm's
   polynomial, with what is lost in 1 + x put back */
static inline lanes log_one_plus(lanes x) {
    const lanes up = x + 1, lost = x - (up - 1);
    const bits shifted = (bits)up - 0x3fe6a09e667f3bcdULL; /* not negative, as x */
    const bits exponent = shifted & ~0xfffffffffffffULL;   /* of 2^k */
    const lanes k = (lanes)((shifted >> 52) + 0x4338000000000000ULL) - ROUND, down = (lanes)(0x3ff0000000000000ULL - exponent);
    const lanes f = ((lanes)((bits)up - exponent) - 1) + lost * down;
    const lanes s = f / (f + 2), half = 0.5 * f * f, z = s * s, w = z * z;
    const lanes even = ((w * 1.531383769920937332e-01 + 2.222219843214978396e-01) * w + 3.999999999940941908e-01) * w;
    const lanes odd = ((w * 1.479819860511658591e-01 + 1.818357216161805012e-01) * w + 2.857142874366239149e-01) * w;
    const lanes p = even + z * (odd + 6.666666666666735130e-01);
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + p) + k * 1.90821492927058770002e-10)) - f);
}

/* Eight rows by n pairs of nodes */
static inline void pairs(const int n, const double *z, const double *w, lanes m, lanes s, lanes *out) {
    lanes f = {0}, a = {0}, b = {0};
    const lanes near = power_of_e(m), product = near * near, scale = s * LOG2E;
    for (int j = 0; j < n; j++) {
        const lanes y = scale * z[j], k = (y + ROUND) - ROUND; /* 2^y and 2^-y have the same halves */
        const Series part = series(y - k);
        const lanes both = near * ((part.even + part.odd) * shifted(k) + (part.even - part.odd) * shifted(-k));
        const lanes total = both + product;
        const lanes r = 1 / (1 + total);
        f += w[j] * log_one_plus(total);
        a += w[j] * ((total + product) * r);
        b += w[j] * ((both + product * (4 + both)) * (r * r));
    }
    out[0] = f, out[1] = a, out[2] = b;
}

static inline void tail(const double *z, const double *w, double m, double v, double s, double *out) {
    const double scale = exp(m + 0.5 * v), centre = m + v;
    if (centre + 8 * s < -37) { /* e^x is nothing beside 1 at every node */
        out[0] = out[1] = out[2] = scale;
        return;
    }
    lanes f = {0}, a = {0}, b = {0};
    for (int j = 0; j < TAIL_NODES; j += LANES) {
        const lanes e = power_of_two(at_least(centre + s * load(z + j), -600) * LOG2E, 0), r = 1 / (1 + e), weight = load(w + j);
        f += weight * (log_one_plus(e) / e);
        a += weight * r;
        b += weight * (r * r);
    }
    out[0] = scale * sum(f), out[1] = scale * sum(a), out[2] = scale * sum(b);
}

/* asinh to within .06 towards zero, less than a step: the bits of a float are nearly its logarithm */
static inline float nearly_asinh(float x) {
    const float size = fabsf(x) + sqrtf(x * x + 1);
    int32_t bits;
    memcpy(&bits, &size, sizeof bits);
    return copysignf((float)(bits - 0x3f800000) * (0.69314718f / 8388608), x);
}

static inline void nodes(int low, int high, int count, const double *x, double m, double inverse, int deep,
                         double *out) {
    const double scale = inverse * 0.84932180028801904272; /* of u² = log₂ e (x - m)²/2v */
    lanes f = {0}, a = {0}, b = {0};
    for (int j = low; j < high; j += LANES) {
        const lanes u = (load(x + j) - m) * scale, density = power_of_two(-u * u, deep);
        f += density * load(x + count + j);
        a += density * load(x + 2 * count + j);
        b += density * load(x + 3 * count + j);
    }
    out[0] = sum(f) * inverse, out[1] = sum(a) * inverse, out[2] = sum(b) * inverse;
}

static inline void wide(const double *series, int terms, double m, double v, double s, double *out) {
    const double u = m / s, density = exp(-0.5 * u * u) * 0.39894228040143267794, inverse = 1 / v;
    const double below = 0.5 * erfc(-0.70710678118654752440 * u);
    double even = 1, odd = u, power = 1, value = 1, slope = 0, curvature = 1;
    for (int k = 1; k <= terms; k++) {
        power *= inverse;
        const double c = power * series[k - 1];
        value += c * even, slope += c * odd;
        even = u * odd - (2 * k - 1) * even;
        odd = u * even - 2 * k * odd;
        curvature += c * even;
    }
    out[0] = m * below + s * density * value, out[1] = below - density * slope, out[2] = density / s * curvature;
}

typedef struct {
    const double *mean, *variance;
    double *value, *slope, *curvature;
} Rows;

static inline void write(const Rows *rows, long i, double value, double slope, double curvature) {
    const double e = rows->mean[i];
    rows->value[i] = e > 0 ? value + e : value;
    rows->slope[i] = e > 0 ? 1 - slope : slope;
    rows->curvature[i] = curvature;
}

/* The tables of the trapezoid rule, and what the settings say of it */
typedef struct {
    const double *grid[GRIDS], *step;
    double reach, deep;
} Nodes;

/* Eight rows, whose first and last nodes are found together */
static inline void between(const Rows *rows, const Nodes *all, int table, const double *m, const double *v,
                           const long *waiting, int count) {
    const double *grid = all->grid[table], first = grid[1] + 1, last = grid[0] - 7, reach = 1 / all->reach;
    const double deep = all->deep, step = 1 / all->step[table];
    double inverse[LANES], peak[LANES];
    int low[LANES], high[LANES];
    for (int k = 0; k < LANES; k++) {
        const double centre = m[k] + v[k], half = -m[k] - 0.5 * v[k], over = 1 / v[k], top = 0.5 * m[k] * m[k] * over;
        peak[k] = centre > 0 ? top : half;
        const double from = centre - sqrt(2 * v[k] * (deep + peak[k] - half)), to = m[k] + sqrt(2 * v[k] * (deep + peak[k]));
        const double under = nearly_asinh((float)(from * reach)) * step - first;
        const double above = nearly_asinh((float)(to * reach)) * step - (first - 3);
        low[k] = (int)(under > 0 ? under : 0);
        high[k] = (int)(above < last ? above : last);
        inverse[k] = sqrt(over);
    }
    for (int k = 0; k < count; k++) {
        double out[3];
        if (peak[k] < 100) /* and what is beyond the window by eight nodes is above 2^-1022 */
            nodes(low[k], high[k], (int)grid[0], grid + 2, m[k], inverse[k], 0, out);
        else
            nodes(low[k], high[k], (int)grid[0], grid + 2, m[k], inverse[k], 1, out);
        write(rows, waiting[k], out[0], out[1], out[2]);
    }
}

static inline void gauss_hermite(const Rows *rows, const int n, const double *table, const double *m, const double *v,
                                 const long *waiting, int count) {
    double s[LANES], value[LANES], slope[LANES], curvature[LANES];
    for (int k = 0; k < LANES; k++) s[k] = sqrt(v[k]);
    lanes out[3];
    pairs(n, table, table + n, load(m), load(s), out);
    memcpy(value, out, sizeof value), memcpy(slope, out + 1, sizeof slope), memcpy(curvature, out + 2, sizeof curvature);
    for (int k = 0; k < count; k++) write(rows, waiting[k], value[k], slope[k], curvature[k]);
}

/* The rows that wait for a rule; where they are fewer than eight the last stands for the others too */
static void flush(const Rows *rows, int rule, const double *tables, const Nodes *all, const long *waiting, int count) {
    double m[LANES], v[LANES];
    for (int k = 0; k < LANES; k++) {
        const long i = waiting[k < count ? k : count - 1];
        m[k] = -fabs(rows->mean[i]), v[k] = rows->variance[i];
    }
    if (rule == 0)
        gauss_hermite(rows, 4, tables, m, v, waiting, count);
    else if (rule == 1)
        gauss_hermite(rows, 8, tables + 8, m, v, waiting, count);
    else
        between(rows, all, rule - 2, m, v, waiting, count);
}

/* settings: s of wide rows, s of those that are wide with |m| less than so many s, tail, band, s of those of the fine
   steps, s of those of the coarse steps with |m| less than so many s, reach, deep, the three steps, terms of the series,
   and the bounds of s.  Returns 0, or 1 at a row that is not finite or has a negative variance. */
int torchngvi_softplus(long count, const double *mean, const double *variance, double *value, double *slope,
                       double *curvature, const double *tables, const double *settings) {
    const double *zt = tables + 24, *series = zt + 2 * TAIL_NODES, *bound = settings + 14;
    const int terms = (int)settings[13];
    const double *grid = series + terms, *second = grid + 2 + 4 * (int)grid[0], *third = second + 2 + 4 * (int)second[0];
    const Nodes all = {{grid, second, third}, settings + 10, settings[8], settings[9]};
    const Rows rows = {mean, variance, value, slope, curvature};
    long waiting[RULES][LANES];
    int waits[RULES] = {0};
    for (long i = 0; i < count; i++) {
        const double v = variance[i], m = -fabs(mean[i]), centre = m + v;
        if (!(v >= 0 && v <= DBL_MAX && m >= -DBL_MAX)) return 1;
        const double s = sqrt(v);
        const int narrow = s < bound[1], far = centre + settings[3] * s < 0;
        if (!narrow && (far || s > settings[0] || (s > settings[1] && m > -settings[2] * s))) {
            double out[3];
            if (far)
                tail(zt, zt + TAIL_NODES, m, v, s, out);
            else
                wide(series, terms, m, v, s, out);
            write(&rows, i, out[0], out[1], out[2]);
            continue;
        }
        /* without branches, which could not be foreseen */
        const int fine = (s < settings[5]) | (centre + settings[4] * s < 0);
        const int coarse = (s > settings[6]) & (m > -settings[7] * s);
        const int rule = narrow ? s >= bound[0] : 2 + (coarse ? 2 : fine);
        waiting[rule][waits[rule]++] = i;
        if (waits[rule] == LANES) flush(&rows, rule, tables, &all, waiting[rule], LANES), waits[rule] = 0;
    }
    for (int rule = 0; rule < RULES; rule++)
        if (waits[rule]) flush(&rows, rule, tables, &all, waiting[rule], waits[rule]);
    return 0;
}
