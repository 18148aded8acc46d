/* The block quantizers of block_quantizer.py in one pass over memory each way: the same bits as the reference there.

   A block of B numbers becomes a scale of 16 bits and B * bits / 8 bytes. A byte holds elements k, k + W, k + 2 W ...
   of its block, W = B * bits / 8, lowest bits first, so that whole vectors are loaded and shifted together. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, MAX_BLOCK = 4096 };
enum { SIGNED_ABSMAX, ABSMAX, NORM, SUM }; /* as SCALE_RULES in block_quantizer.py */

static const float MIN_NORMAL = 0x1p-96f; /* reciprocals of smaller scales overflow */
static const uint32_t INFINITY_BITS = 0x7f800000u;

/* Encode a scale in 16 bits: the exponent and 6 bits of the fraction, rounded up, then the sign. The first bit marks
   scales that were multiplied by 2^64. */
static uint16_t pack_scale(float scale) {
    const uint16_t negative = scale < 0;
    uint16_t mark = 0;
    uint32_t bits;
    if (isnan(scale)) return 0x7fc0;
    scale = fabsf(scale);
    if (scale < MIN_NORMAL) {
        scale *= 0x1p64f;
        mark = 0x8000;
    }
    memcpy(&bits, &scale, 4);
    bits = (bits + 0x1ffffu) >> 17 << 1;
    return mark | negative | (uint16_t)(bits > 0x7f7e ? 0x7f7e : bits);
}

static float unpack_scale(uint16_t code) {
    const uint32_t bits = (uint32_t)(code & 0x7ffe) << 16 | (uint32_t)code << 31;
    float scale;
    memcpy(&scale, &bits, 4);
    return code & 0x8000 ? scale * 0x1p-64f : scale;
}

static float block_scale(const float *x, int count, int rule) {
    uint32_t max_bits[LANES] = {0};
    float sums[LANES] = {0};
    uint32_t bits, m = 0;
    float total = 0;
    for (int k = 0; k < count; k += LANES)
        for (int j = 0; j < LANES; j++) {
            memcpy(&bits, x + k + j, 4);
            bits = bits << 1 | bits >> 31; /* the magnitude, then the sign */
            max_bits[j] = bits > max_bits[j] ? bits : max_bits[j];
        }
    for (int j = 0; j < LANES; j++) m = max_bits[j] > m ? max_bits[j] : m;
    const int negative = m & 1;
    m >>= 1;
    if (m >= INFINITY_BITS) return NAN;
    float absmax;
    memcpy(&absmax, &m, 4);
    if (rule == ABSMAX) return absmax;
    if (rule == SIGNED_ABSMAX) return negative ? absmax : -absmax;
    if (rule == SUM) {
        for (int k = 0; k < count; k += LANES)
            for (int j = 0; j < LANES; j++) sums[j] += fabsf(x[k + j]);
        for (int j = 0; j < LANES; j++) total += sums[j];
        return total;
    }
    if (absmax == 0) return 0;
    for (int k = 0; k < count; k += LANES)
        for (int j = 0; j < LANES; j++) {
            float v = x[k + j] / absmax;
            sums[j] += v * v;
        }
    for (int j = 0; j < LANES; j++) total += sums[j];
    return absmax * sqrtf(total);
}

/* Return a block of numbers. The last block is copied to `tail` and padded with zeros. */
static const float *padded_block(const float *x, int64_t count, int block, float *tail) {
    if (count >= block) return x;
    memset(tail, 0, block * sizeof(float));
    return memcpy(tail, x, count * sizeof(float));
}

/* Return a random number in [0, 1) that depends on counter and seed (Ellis, "lowbias32"). */
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
    float tail[MAX_BLOCK], level[MAX_BLOCK];
    for (int64_t start = 0; start < n; start += block, x += block, out += 2 + width) {
        const float *v = padded_block(x, n - start, block, tail);
        const uint16_t code = pack_scale(block_scale(v, block, rule));
        const float scale = unpack_scale(code);
        const float up = fabsf(scale) >= MIN_NORMAL ? (float)top / scale : 0.0f;
        if (fabsf(scale) >= MIN_NORMAL)
            for (int k = 0; k < block; k++) level[k] = v[k] * up;
        else if (fabsf(scale) > 0)
            for (int k = 0; k < block; k++) level[k] = v[k] / scale * (float)top;
        else
            memset(level, 0, sizeof level);
        if (stochastic)
            for (int k = 0; k < block; k++) level[k] = floorf(level[k] + uniform((uint32_t)(start + k), seed));
        else
            for (int k = 0; k < block; k++) level[k] = rintf(level[k]);
        for (int k = 0; k < block; k++) { /* if top is middle, there is one positive level less */
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
    float tail[MAX_BLOCK];
    for (int64_t start = 0; start < n; start += block, in += 2 + width, out += block) {
        uint16_t code;
        memcpy(&code, in, 2);
        const float scale = unpack_scale(code);
        float *to = n - start < block ? tail : out;
        const uint8_t *from = in + 2;
        const float down = scale / (float)top;
        if (fabsf(scale) >= MIN_NORMAL || scale == 0)
            for (int j = 0; j < per; j++)
                for (int k = 0; k < width; k++)
                    to[j * width + k] = (float)(((from[k] >> (bits * j)) & mask) - middle) * down;
        else /* denormal or NaN */
            for (int j = 0; j < per; j++)
                for (int k = 0; k < width; k++)
                    to[j * width + k] = (float)(((from[k] >> (bits * j)) & mask) - middle) / (float)top * scale;
        if (to == tail) memcpy(out, tail, (n - start) * sizeof(float));
    }
}

void encode_signs(const float *x, int64_t n, uint8_t *out, int block) {
    const int width = block / 8;
    float tail[MAX_BLOCK];
    for (int64_t start = 0; start < n; start += block, x += block, out += 2 + width) {
        const float *v = padded_block(x, n - start, block, tail);
        const int count = v == tail ? (int)(n - start) : block;
        const uint16_t code = pack_scale(block_scale(v, block, SUM) / (float)count);
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
    float tail[MAX_BLOCK];
    for (int64_t start = 0; start < n; start += block, in += 2 + width, out += block) {
        uint16_t code;
        memcpy(&code, in, 2);
        const float magnitude = unpack_scale(code);
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
