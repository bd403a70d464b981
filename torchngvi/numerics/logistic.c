/* Moments of the softplus under N(e, v): the rules of logistic_rules.py, whose tables come packed in one vector.

   The loops run over the nodes of one row, since rows take different branches; compiled with -Ofast and -fopenmp-simd
   they use the vector exp and log1p of glibc.  Every row is finite and v is not negative: the caller sees to it. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define TAIL_NODES 24

static inline void pairs(const int n, const double *restrict z, const double *restrict w, double m, double s,
                         double *out) {
    double f = 0, a = 0, b = 0;
    const double near = exp(m), product = near * near;
#pragma omp simd reduction(+ : f, a, b)
    for (int j = 0; j < n; j++) {
        const double up = exp(s * z[j]), both = near * (up + 1 / up), total = both + product, r = 1 / (1 + total);
        f += w[j] * log1p(total);
        a += w[j] * ((total + product) * r);
        b += w[j] * ((both + product * (4 + both)) * (r * r));
    }
    out[0] = f, out[1] = a, out[2] = b;
}

static inline void tail(const double *restrict z, const double *restrict w, double m, double v, double s,
                        double *out) {
    double f = 0, a = 0, b = 0;
    const double scale = exp(m + 0.5 * v), centre = m + v;
    if (centre + 8 * s < -37) { /* e^x is nothing beside 1 at every node */
        out[0] = out[1] = out[2] = scale;
        return;
    }
#pragma omp simd reduction(+ : f, a, b)
    for (int j = 0; j < TAIL_NODES; j++) {
        const double e = exp(fmax(centre + s * z[j], -600.0)), r = 1 / (1 + e);
        f += w[j] * (log1p(e) / e);
        a += w[j] * r;
        b += w[j] * (r * r);
    }
    out[0] = scale * f, out[1] = scale * a, out[2] = scale * b;
}

/* asinh to within .06 towards zero, less than a step: the bits of a float are nearly its logarithm */
static inline float nearly_asinh(float x) {
    const float size = fabsf(x) + sqrtf(x * x + 1);
    int32_t bits;
    memcpy(&bits, &size, sizeof bits);
    return copysignf((float)(bits - 0x3f800000) * (0.69314718f / 8388608), x);
}

static inline void between(const double *grid, double step, double reach, double deep, double m, double v, double s,
                           double *out) {
    const int count = (int)grid[0];
    const double first = grid[1], *restrict x = grid + 2, *restrict wf = x + count, *restrict wa = wf + count,
                 *restrict wb = wa + count;
    const double centre = m + v, peak = centre > 0 ? 0.5 * m * m / v : -m - 0.5 * v, inverse = 1 / s;
    const double from = centre - sqrt(2 * v * (deep + peak + m + 0.5 * v)), to = m + sqrt(2 * v * (deep + peak));
    int low = (int)(nearly_asinh((float)(from / reach)) / step - first) - 1;
    int high = (int)(nearly_asinh((float)(to / reach)) / step - first) + 2;
    low = low < 0 ? 0 : low;
    high = high > count - 7 ? count - 7 : high;
    double f = 0, a = 0, b = 0;
    for (int block = low; block < high; block += 8) {
#pragma omp simd reduction(+ : f, a, b)
        for (int j = block; j < block + 8; j++) {
            const double u = (x[j] - m) * inverse, density = exp(-0.5 * u * u);
            f += density * wf[j];
            a += density * wa[j];
            b += density * wb[j];
        }
    }
    out[0] = f * inverse, out[1] = a * inverse, out[2] = b * inverse;
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

/* settings: narrow, wide, tail, band, reach, deep, step, fine step, terms of the series, and the bounds of s */
void torchngvi_softplus(long rows, const double *mean, const double *variance, double *value, double *slope,
                        double *curvature, const double *tables, const double *settings) {
    const double *z8 = tables, *z16 = z8 + 8, *z32 = z16 + 16, *zt = z32 + 32, *series = zt + 2 * TAIL_NODES;
    const int terms = (int)settings[8];
    const double *grid = series + terms, *fine = grid + 2 + 4 * (int)grid[0], *bound = settings + 9;
    for (long i = 0; i < rows; i++) {
        const double e = mean[i], v = variance[i], s = sqrt(v), m = -fabs(e), centre = m + v;
        double out[3];
        if (s < bound[0])
            pairs(4, z8, z8 + 4, m, s, out);
        else if (s < bound[1])
            pairs(8, z16, z16 + 8, m, s, out);
        else if (s < settings[0])
            pairs(16, z32, z32 + 16, m, s, out);
        else if (centre + settings[2] * s < 0)
            tail(zt, zt + TAIL_NODES, m, v, s, out);
        else if (s > settings[1])
            wide(series, terms, m, v, s, out);
        else if (centre + settings[3] * s < 0)
            between(fine, settings[7], settings[4], settings[5], m, v, s, out);
        else
            between(grid, settings[6], settings[4], settings[5], m, v, s, out);
        value[i] = e > 0 ? out[0] + e : out[0];
        slope[i] = e > 0 ? 1 - out[1] : out[1];
        curvature[i] = out[2];
    }
}
