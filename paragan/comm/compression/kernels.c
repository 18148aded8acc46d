/* The block quantizers of blocks.py, fused: one pass over memory each way, the same bits as the plain form there.

   A block of B numbers becomes a scale of 16 bits and B bits / 8 bytes; a byte holds elements k, k + W, k + 2 W ... of its
   block, W = B bits / 8, lowest bits first, so that whole vectors are loaded and shifted together. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, MOST = 4096 };
enum { EXTREME, LARGEST, NORM, SUM };

static const float TINY = 0x1p-96f; /* below, reciprocals overflow */
static const uint32_t INFINITE = 0x7f800000u;

/* A scale in 16 bits: the exponent and 6 bits of the fraction, rounded up, then the sign. The first bit marks those that
   are 2^64 times too large. */
static uint16_t packed(float scale) {
    const uint16_t negative = scale < 0;
    uint16_t mark = 0;
    uint32_t bits;
    if (isnan(scale)) return 0x7fc0;
    scale = fabsf(scale);
    if (scale < TINY) {
        scale *= 0x1p64f;
        mark = 0x8000;
    }
    memcpy(&bits, &scale, 4);
    bits = (bits + 0x1ffffu) >> 17 << 1;
    return mark | negative | (uint16_t)(bits > 0x7f7e ? 0x7f7e : bits);
}

static float unpacked(uint16_t code) {
    const uint32_t bits = (uint32_t)(code & 0x7ffe) << 16 | (uint32_t)code << 31;
    float scale;
    memcpy(&scale, &bits, 4);
    return code & 0x8000 ? scale * 0x1p-64f : scale;
}

static float scale_of(const float *x, int count, int rule) {
    uint32_t most[LANES] = {0};
    float sums[LANES] = {0};
    uint32_t bits, m = 0;
    float total = 0;
    for (int k = 0; k < count; k += LANES)
        for (int j = 0; j < LANES; j++) {
            memcpy(&bits, x + k + j, 4);
            bits = bits << 1 | bits >> 31; /* the magnitude, then the sign */
            most[j] = bits > most[j] ? bits : most[j];
        }
    for (int j = 0; j < LANES; j++) m = most[j] > m ? most[j] : m;
    const int negative = m & 1;
    m >>= 1;
    if (m >= INFINITE) return NAN;
    float largest;
    memcpy(&largest, &m, 4);
    if (rule == LARGEST) return largest;
    if (rule == EXTREME) return negative ? largest : -largest;
    if (rule == SUM) {
        for (int k = 0; k < count; k += LANES)
            for (int j = 0; j < LANES; j++) sums[j] += fabsf(x[k + j]);
        for (int j = 0; j < LANES; j++) total += sums[j];
        return total;
    }
    if (largest == 0) return 0;
    for (int k = 0; k < count; k += LANES)
        for (int j = 0; j < LANES; j++) {
            float v = x[k + j] / largest;
            sums[j] += v * v;
        }
    for (int j = 0; j < LANES; j++) total += sums[j];
    return largest * sqrtf(total);
}

/* A block's numbers: where fewer are left, in `tail`, filled up with zeros. */
static const float *filled_up(const float *x, int64_t left, int block, float *tail) {
    if (left >= block) return x;
    memset(tail, 0, block * sizeof(float));
    return memcpy(tail, x, left * sizeof(float));
}

/* A random number in [0, 1) from a counter (Ellis, "lowbias32"). */
static inline float uniform(uint32_t counter, uint32_t seed) {
    uint32_t h = counter * 0x9e3779b9u + seed;
    h = (h ^ (h >> 16)) * 0x21f0aaadu;
    h = (h ^ (h >> 15)) * 0x735a2d97u;
    h ^= h >> 15;
    return (float)(int32_t)(h >> 8) * 0x1p-24f;
}

void encode_levels(const float *x, int64_t n, uint8_t *out, int block, int bits, int top, int rule, int stochastic,
                   uint32_t seed) {
    const int width = block * bits / 8, per = 8 / bits, middle = 1 << (bits - 1);
    const float bottom = -(float)top, high = (float)(top < middle ? top : middle - 1);
    float tail[MOST], level[MOST];
    for (int64_t start = 0; start < n; start += block, x += block, out += 2 + width) {
        const float *v = filled_up(x, n - start, block, tail);
        const uint16_t code = packed(scale_of(v, block, rule));
        const float scale = unpacked(code);
        const float up = fabsf(scale) >= TINY ? (float)top / scale : 0.0f;
        if (fabsf(scale) >= TINY)
            for (int k = 0; k < block; k++) level[k] = v[k] * up;
        else if (fabsf(scale) > 0)
            for (int k = 0; k < block; k++) level[k] = v[k] / scale * (float)top;
        else
            memset(level, 0, sizeof level);
        if (stochastic)
            for (int k = 0; k < block; k++) level[k] = floorf(level[k] + uniform((uint32_t)(start + k), seed));
        else
            for (int k = 0; k < block; k++) level[k] = rintf(level[k]);
        for (int k = 0; k < block; k++) { /* there is one positive level less than negative ones, if top is middle */
            const float low = level[k] > bottom ? level[k] : bottom;
            level[k] = low < high ? low : high;
        }
        memcpy(out, &code, 2);
        uint8_t *to = out + 2;
        if (per == 1)
            for (int k = 0; k < width; k++) to[k] = (uint8_t)((int32_t)level[k] + middle);
        else if (per == 2)
            for (int k = 0; k < width; k++)
                to[k] = (uint8_t)(((int32_t)level[k] + middle) | ((int32_t)level[k + width] + middle) << 4);
        else
            for (int k = 0; k < width; k++)
                to[k] = (uint8_t)(((int32_t)level[k] + middle) | ((int32_t)level[k + width] + middle) << 2 |
                                  ((int32_t)level[k + 2 * width] + middle) << 4 |
                                  ((int32_t)level[k + 3 * width] + middle) << 6);
    }
}

void decode_levels(const uint8_t *in, int64_t n, float *out, int block, int bits, int top) {
    const int width = block * bits / 8, per = 8 / bits, middle = 1 << (bits - 1), mask = (1 << bits) - 1;
    float tail[MOST];
    for (int64_t start = 0; start < n; start += block, in += 2 + width, out += block) {
        uint16_t code;
        memcpy(&code, in, 2);
        const float scale = unpacked(code);
        float *to = n - start < block ? tail : out;
        const uint8_t *from = in + 2;
        const float down = scale / (float)top;
        if (fabsf(scale) >= TINY || scale == 0)
            for (int j = 0; j < per; j++)
                for (int k = 0; k < width; k++)
                    to[j * width + k] = (float)(((from[k] >> (bits * j)) & mask) - middle) * down;
        else /* denormal, or no number */
            for (int j = 0; j < per; j++)
                for (int k = 0; k < width; k++)
                    to[j * width + k] = (float)(((from[k] >> (bits * j)) & mask) - middle) / (float)top * scale;
        if (to == tail) memcpy(out, tail, (n - start) * sizeof(float));
    }
}

void encode_signs(const float *x, int64_t n, uint8_t *out, int block) {
    const int width = block / 8;
    float tail[MOST];
    for (int64_t start = 0; start < n; start += block, x += block, out += 2 + width) {
        const float *v = filled_up(x, n - start, block, tail);
        const int count = v == tail ? (int)(n - start) : block;
        const uint16_t code = packed(scale_of(v, block, SUM) / (float)count);
        memcpy(out, &code, 2);
        uint8_t *to = out + 2;
        memset(to, 0, width);
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < width; k++) {
                uint32_t bits;
                memcpy(&bits, v + j * width + k, 4);
                to[k] |= (uint8_t)((bits >> 31) << j);
            }
    }
}

void decode_signs(const uint8_t *in, int64_t n, float *out, int block) {
    const int width = block / 8;
    float tail[MOST];
    for (int64_t start = 0; start < n; start += block, in += 2 + width, out += block) {
        uint16_t code;
        memcpy(&code, in, 2);
        const float magnitude = unpacked(code);
        uint32_t scale;
        memcpy(&scale, &magnitude, 4);
        float *to = n - start < block ? tail : out;
        const uint8_t *from = in + 2;
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < width; k++) {
                const uint32_t bits = scale ^ ((uint32_t)(from[k] >> j) << 31);
                memcpy(to + j * width + k, &bits, 4);
            }
        if (to == tail) memcpy(out, tail, (n - start) * sizeof(float));
    }
}
