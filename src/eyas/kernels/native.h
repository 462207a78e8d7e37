/* What the C kernels share: vectors of 16 numbers, and the plans that Python fills.
 *
 * Counts and strides are in elements.
 */

#ifndef EYAS_NATIVE_H
#define EYAS_NATIVE_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define WIDTH 16

typedef float vec __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint16_t half __attribute__((vector_size(32)));
typedef uint8_t ubytes __attribute__((vector_size(16)));

INLINE int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

INLINE const char *at(const void *p, int64_t index, int is_bf16) {
    return (const char *)p + index * (is_bf16 ? 2 : 4);
}

INLINE char *into(void *p, int64_t index, int is_bf16) {
    return (char *)p + index * (is_bf16 ? 2 : 4);
}

INLINE vec splat(float x) { return x - (vec){}; }

INLINE vec pick(ints mask, vec yes, vec no) {
    return (vec)(((bits)mask & (bits)yes) | (~(bits)mask & (bits)no));
}

/* ---- loads and stores ---- */

INLINE vec widen(half h) { return (vec)(__builtin_convertvector(h, bits) << 16); }

INLINE half narrow(vec x) {
#ifdef __AVX512BF16__ /* the same but for denormals, which become 0 */
    return (half)_mm512_cvtneps_pbh((__m512)x);
#endif
    bits u = (bits)x, nan = (bits)(x != x);
    bits rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), half);
}

INLINE vec load(const void *p, int64_t index, int is_bf16) {
    if (is_bf16) {
        half h;
        memcpy(&h, at(p, index, 1), sizeof h);
        return widen(h);
    }
    vec x;
    memcpy(&x, at(p, index, 0), sizeof x);
    return x;
}

INLINE void store(void *p, int64_t index, vec x, int is_bf16) {
    if (is_bf16) {
        half h = narrow(x);
        memcpy(into(p, index, 1), &h, sizeof h);
    } else {
        memcpy(into(p, index, 0), &x, sizeof x);
    }
}

/* The same for the last, incomplete vector of a row: n elements, zeros after them. */
INLINE vec load_part(const void *p, int64_t index, int64_t n, int is_bf16) {
    float whole[WIDTH] = {0};
    if (is_bf16) {
        half h = {0};
        memcpy(&h, at(p, index, 1), 2 * n);
        return widen(h);
    }
    memcpy(whole, at(p, index, 0), 4 * n);
    return load(whole, 0, 0);
}

INLINE void store_part(void *p, int64_t index, vec x, int64_t n, int is_bf16) {
    if (is_bf16) {
        half h = narrow(x);
        memcpy(into(p, index, 1), &h, 2 * n);
    } else {
        memcpy(into(p, index, 0), &x, 4 * n);
    }
}

INLINE vec rounded(vec x, int is_bf16) { return is_bf16 ? widen(narrow(x)) : x; }

INLINE float sum(vec x) {
    float total = 0;
    for (int width = WIDTH / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return total + x[0];
}

/* e^x within 2 ulp: x = n ln 2 + r, a polynomial for e^r, n into the exponent. */
INLINE vec exponential(vec x) {
    x = pick(x > 88.0f, splat(88.0f), x);
    x = pick(x < -87.0f, splat(-87.0f), x);
    vec n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* ---- plans ---- */

typedef struct {
    const void *cos, *sin;  /* [rows, rotary]; the first half of sin is negated */
    const int64_t *write;   /* cache row of each row */
    int64_t rows, stride;   /* of the fused projection: q heads, k heads, v heads */
    int64_t num_q, num_k, size, v_size, rotary;
    int64_t k_stride, v_stride, is_bf16; /* between rows of the cache */
} RopePlan;

typedef struct {
    const int64_t *read;  /* [requests, num_read] rows of the cache */
    const void *bias;     /* [requests, queries, num_read]: 0 or -inf, or any number to add */
    int64_t requests, queries, num_read;
    int64_t heads, kv_heads, size, v_size;
    int64_t q_stride, k_stride, v_stride; /* between rows */
    int64_t is_bf16;
    float scale;
    /* Filled by attend_prepare: what some query row sees, the rest left out. S below is num_read
     * padded to whole vectors. */
    int64_t *count;       /* [requests] */
    int64_t *rows;        /* [requests, S] */
    float *added;         /* [requests, queries, S], -inf past count */
    unsigned char *mixed; /* [requests, S / WIDTH]: some row of the block is hidden from a query */
    float *scratch;       /* see attend_typed */
} AttendPlan;

/* A tree over a paged prefix: what attend_tree makes rows and masks from. */
typedef struct {
    const int64_t *table;         /* page tables, table_stride apart */
    const int64_t *slots, *end;   /* [requests]; the prefix is first_index .. end - 1 */
    const unsigned char *visible; /* [requests, queries, nodes], by its three strides */
    int64_t table_stride, visible_r, visible_q, visible_n;
    int64_t nodes, first_index, last_index; /* no index of the prefix is last_index or above */
    int64_t page_size, first_scratch, num_scratch; /* scratch rows come after those of the pages */
} TreePlan;

void rms_norm_bf16(
    const void *x, const void *weight, void *out, int64_t outer, int64_t inner, int64_t stride,
    int64_t size, float eps
);
void add_rms_norm_bf16(
    const void *x, const void *delta, const void *weight, void *total, void *out, int64_t rows,
    int64_t size, float eps
);
void silu_mul_bf16(const void *x, void *out, int64_t rows, int64_t stride, int64_t size);
void rope_write(const RopePlan *p, const void *qkv, void *q, void *k_cache, void *v_cache);
void attend(const AttendPlan *p, const void *q, const void *k, const void *v, void *out);

#endif
