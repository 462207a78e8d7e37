/* One step of an EAGLE-3 draft for few rows: from token and hidden state to logits in one call.
 *
 * A step of a small draft is some twenty operations of microseconds each. Here they follow one
 * another without a tensor between them; the products are spread over the threads of torch's own
 * OpenMP runtime, whose entry points are handed over at load (a second runtime would spin against
 * it). Without them, one thread does it all.
 *
 * bf16 throughout, rounded where the torch modules round. The head is int8: it only proposes, so
 * that its rounding can cost acceptance and never changes the output. See native_draft.py.
 */

#include "native.h"
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

/* ---- threads ---- */

static void (*omp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_rank)(void), (*omp_size)(void);

void use_threads(void *parallel, void *rank, void *size) {
    memcpy(&omp_parallel, &parallel, sizeof parallel);
    memcpy(&omp_rank, &rank, sizeof rank);
    memcpy(&omp_size, &size, sizeof size);
}

typedef struct {
    void (*part)(const void *job, int64_t first, int64_t end);
    const void *job;
    int64_t count, unit; /* things to do; a part begins at a multiple of unit */
} Spread;

static void run_part(void *p) {
    const Spread *s = p;
    const int64_t rank = omp_rank(), size = omp_size(), units = (s->count + s->unit - 1) / s->unit;
    const int64_t first = units * rank / size * s->unit, end = units * (rank + 1) / size * s->unit;
    if (first < s->count) s->part(s->job, first, end < s->count ? end : s->count);
}

static void spread(
    void (*part)(const void *, int64_t, int64_t), const void *job, int64_t count, int64_t unit,
    int64_t threads
) {
    Spread s = {part, job, count, unit};
    if (threads > 1 && omp_parallel)
        omp_parallel(run_part, &s, (unsigned)threads, 0);
    else
        part(job, 0, count);
}

/* ---- y = x W^T in bf16: weights as they lie, each read once for all rows ---- */

#define OUTPUTS 4 /* at once */

typedef struct {
    const uint16_t *weight, *x; /* [out, in], [rows, in] */
    uint16_t *y;                /* [rows, out] */
    int64_t in, out, rows;
} Product;

INLINE void store_one(uint16_t *to, float x) {
    half h = narrow(splat(x));
    *to = h[0];
}

/* `outputs` weights' rows from o on, times `rows` rows from r on. */
INLINE void product_block(
    const Product *p, int64_t o, int64_t r, const int outputs, const int rows
) {
    const uint16_t *w = p->weight + o * p->in, *x = p->x + r * p->in;
    vec total[OUTPUTS][4] = {0};
    for (int64_t i = 0; i < p->in; i += WIDTH) {
        vec in[4];
        for (int k = 0; k < rows; k++) in[k] = load(x + k * p->in, i, 1);
        for (int j = 0; j < outputs; j++) {
            const vec weight = load(w + j * p->in, i, 1);
            for (int k = 0; k < rows; k++) total[j][k] += weight * in[k];
        }
    }
    for (int j = 0; j < outputs; j++)
        for (int k = 0; k < rows; k++)
            store_one(p->y + (r + k) * p->out + o + j, sum(total[j][k]));
}

static void product_part(const void *job, int64_t first, int64_t end) {
    const Product *p = job;
    for (int64_t o = first; o < end; o += OUTPUTS) {
        int64_t r = 0;
        if (end - o >= OUTPUTS) {
            for (; r + 4 <= p->rows; r += 4) product_block(p, o, r, OUTPUTS, 4);
            for (; r + 2 <= p->rows; r += 2) product_block(p, o, r, OUTPUTS, 2);
            for (; r < p->rows; r++) product_block(p, o, r, OUTPUTS, 1);
        } else {
            for (int64_t j = o; j < end; j++)
                for (r = 0; r < p->rows; r++) product_block(p, j, r, 1, 1);
        }
    }
}

void bf16_product(
    const void *weight, const uint16_t *x, uint16_t *y, int64_t in, int64_t out, int64_t rows,
    int64_t threads
) {
    const Product p = {weight, x, y, in, out, rows};
    spread(product_part, &p, out, OUTPUTS, threads);
}

/* ---- logits of an int8 head ---- */

typedef struct {
    const int8_t *weight;   /* [out, in] */
    const float *scale;     /* [out] */
    const int32_t *offset;  /* [out]: 128 times the sum of a row's weights */
    const uint8_t *x;       /* [rows, in]: rounded to 127ths of the row's largest, plus 128 */
    const float *x_scale;   /* [rows] */
    float *y;               /* [rows, out] */
    int64_t in, out, rows;
} Head;

INLINE int32_t dot_bytes(const int8_t *w, const uint8_t *x, int64_t n) {
    int32_t total = 0;
    int64_t i = 0;
#ifdef __AVX512VNNI__
    __m512i sums = _mm512_setzero_si512();
    for (; i + 64 <= n; i += 64)
        sums = _mm512_dpbusd_epi32(
            sums, _mm512_loadu_si512((const void *)(x + i)), _mm512_loadu_si512((const void *)(w + i))
        );
    total = _mm512_reduce_add_epi32(sums);
#endif
    for (; i < n; i++) total += (int32_t)x[i] * w[i];
    return total;
}

static void head_part(const void *job, int64_t first, int64_t end) {
    const Head *h = job;
    for (int64_t o = first; o < end; o++)
        for (int64_t r = 0; r < h->rows; r++) {
            const int32_t whole = dot_bytes(h->weight + o * h->in, h->x + r * h->in, h->in);
            h->y[r * h->out + o] = (float)(whole - h->offset[o]) * h->scale[o] * h->x_scale[r];
        }
}

/* One row as bytes; returns what a step of them is worth. NaN and infinity give NaN. */
INLINE float to_bytes(const uint16_t *x, uint8_t *out, int64_t n) {
    vec most = {0};
    int bad = 0;
    for (int64_t i = 0; i < n; i += WIDTH) {
        vec v = load(x, i, 1);
        v = (vec)((bits)v & 0x7fffffffu);
        for (int lane = 0; lane < WIDTH; lane++) bad |= !(v[lane] < INFINITY);
        most = pick(v > most, v, most);
    }
    float top = 0;
    for (int lane = 0; lane < WIDTH; lane++) top = most[lane] > top ? most[lane] : top;
    if (bad) top = 0;
    const float scale = top / 127.0f, per = top > 0 ? 127.0f / top : 0;
    for (int64_t i = 0; i < n; i += WIDTH) {
        /* The sum's last bits are the rounded number, as a float of this size has no fraction. */
        const vec shifted = load(x, i, 1) * per + 12583040.0f;
        const bits low = (bits)shifted & 0xff;
        for (int lane = 0; lane < WIDTH; lane++) out[i + lane] = bad ? 128 : (uint8_t)low[lane];
    }
    return bad ? NAN : scale;
}

void head_logits(
    const int8_t *weight, const float *scale, const int32_t *offset, const uint16_t *x, float *y,
    uint8_t *bytes, float *x_scale, int64_t in, int64_t out, int64_t rows, int64_t threads
) {
    for (int64_t r = 0; r < rows; r++) x_scale[r] = to_bytes(x + r * in, bytes + r * in, in);
    const Head h = {weight, scale, offset, bytes, x_scale, y, in, out, rows};
    spread(head_part, &h, out, 16, threads);
}

/* ---- the step ---- */

typedef struct {
    const uint16_t *embed;                          /* [tokens, hidden] */
    const uint16_t *input_norm, *hidden_norm, *post_norm, *last_norm;
    const uint16_t *qkv, *o, *gate_up, *down;       /* [out, in] each */
    const int8_t *head;
    const float *head_scale;
    const int32_t *head_offset;
    const uint16_t *cos, *sin;                      /* [positions, rotary] */
    int64_t hidden, inner, heads, kv_heads, size, v_size, rotary, vocab;
    int64_t norm_before_residual, norm_output;
    float input_eps, hidden_eps, post_eps, last_eps;
} DraftPlan;

/* Buffers of a step, in elements of 2 bytes, one after the other; each begins at a cache line. */
INLINE uint16_t *take(uint16_t **free, int64_t n) {
    uint16_t *taken = *free;
    *free += (n + 31) / 32 * 32;
    return taken;
}

/* [norm(embedding), norm(hidden)] of each row. */
static void pair_rows(
    const DraftPlan *p, const int64_t *tokens, const uint16_t *hidden, uint16_t *pairs, int64_t rows
) {
    const int64_t n = p->hidden;
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *embedded = p->embed + tokens[r] * n;
        uint16_t *pair = pairs + 2 * r * n;
        rms_norm_bf16(embedded, p->input_norm, pair, 1, 1, n, n, p->input_eps);
        rms_norm_bf16(hidden + r * n, p->hidden_norm, pair + n, 1, 1, n, n, p->hidden_eps);
    }
}

/* q, k, v of pairs; k and v are stored, q comes back rotated. */
static void project(
    const DraftPlan *p, const uint16_t *pairs, uint16_t *q, const int64_t *positions,
    const int64_t *write, void *k_cache, void *v_cache, int64_t k_stride, int64_t v_stride,
    uint16_t *work, int64_t rows, int64_t threads
) {
    const int64_t width = (p->heads + p->kv_heads) * p->size + p->kv_heads * p->v_size;
    uint16_t *qkv = take(&work, rows * width);
    uint16_t *cos = take(&work, rows * p->rotary), *sin = take(&work, rows * p->rotary);
    bf16_product(p->qkv, pairs, qkv, 2 * p->hidden, width, rows, threads);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(cos + r * p->rotary, p->cos + positions[r] * p->rotary, 2 * p->rotary);
        memcpy(sin + r * p->rotary, p->sin + positions[r] * p->rotary, 2 * p->rotary);
    }
    const RopePlan rope = {
        cos, sin, write, rows, width, p->heads, p->kv_heads, p->size, p->v_size, p->rotary,
        k_stride, v_stride, 1,
    };
    rope_write(&rope, qkv, q, k_cache, v_cache);
}

/* logits [rows, vocab], out [rows, hidden]: what the next step is fed. work: see draft_work. */
void draft_step(
    const DraftPlan *p, const AttendPlan *a, const int64_t *tokens, const uint16_t *hidden,
    const int64_t *positions, const int64_t *write, void *k_cache, void *v_cache, uint16_t *out,
    float *logits, uint16_t *work, int64_t rows, int64_t threads
) {
    const int64_t n = p->hidden, q_width = p->heads * p->size, o_width = p->heads * p->v_size;
    uint16_t *pairs = take(&work, 2 * rows * n), *q = take(&work, rows * q_width);
    uint16_t *mixed = take(&work, rows * o_width), *residual = take(&work, rows * n);
    uint16_t *delta = take(&work, rows * n), *total = take(&work, rows * n);
    uint16_t *normed = take(&work, rows * n), *gated = take(&work, 2 * rows * p->inner);
    uint16_t *active = take(&work, rows * p->inner), *bytes = take(&work, rows * n);
    float *x_scale = (float *)take(&work, 2 * rows);

    pair_rows(p, tokens, hidden, pairs, rows);
    for (int64_t r = 0; r < rows; r++)
        memcpy(
            residual + r * n, p->norm_before_residual ? pairs + (2 * r + 1) * n : hidden + r * n,
            2 * n
        );
    project(
        p, pairs, q, positions, write, k_cache, v_cache, a->k_stride, a->v_stride, work, rows, threads
    );
    attend(a, q, k_cache, v_cache, mixed);
    bf16_product(p->o, mixed, delta, o_width, n, rows, threads);
    add_rms_norm_bf16(residual, delta, p->post_norm, total, normed, rows, n, p->post_eps);
    bf16_product(p->gate_up, normed, gated, n, 2 * p->inner, rows, threads);
    silu_mul_bf16(gated, active, rows, 2 * p->inner, p->inner);
    bf16_product(p->down, active, delta, p->inner, n, rows, threads);
    /* The last sum is what is fed back, its norm what the head reads (or both are the norm). */
    add_rms_norm_bf16(total, delta, p->last_norm, residual, normed, rows, n, p->last_eps);
    memcpy(out, p->norm_output ? normed : residual, 2 * rows * n);
    head_logits(
        p->head, p->head_scale, p->head_offset, normed, logits, (uint8_t *)bytes, x_scale, n,
        p->vocab, rows, threads
    );
}

/* Only the keys and values of rows. */
void draft_write(
    const DraftPlan *p, const int64_t *tokens, const uint16_t *hidden, const int64_t *positions,
    const int64_t *write, void *k_cache, void *v_cache, uint16_t *work, int64_t k_stride,
    int64_t v_stride, int64_t rows, int64_t threads
) {
    uint16_t *pairs = take(&work, 2 * rows * p->hidden);
    uint16_t *q = take(&work, rows * p->heads * p->size);
    pair_rows(p, tokens, hidden, pairs, rows);
    project(p, pairs, q, positions, write, k_cache, v_cache, k_stride, v_stride, work, rows, threads);
}

/* Elements that `work` must have for so many rows. */
int64_t draft_work(const DraftPlan *p, int64_t rows) {
    const int64_t q_width = p->heads * p->size, v_width = p->heads * p->v_size;
    const int64_t kv_width = p->kv_heads * (p->size + p->v_size);
    const int64_t sizes[] = {2 * p->hidden, q_width, v_width, p->hidden, p->hidden, p->hidden,
                             p->hidden, 2 * p->inner, p->inner, p->hidden, 2,
                             q_width + kv_width, p->rotary, p->rotary};
    int64_t total = 0;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
        total += (rows * sizes[i] + 31) / 32 * 32;
    return total;
}
