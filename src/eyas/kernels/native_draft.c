/* One step of an EAGLE-3 draft for few rows: from token and hidden state to logits in one call.
 *
 * A step of a small draft is some twenty operations of microseconds each. Here they follow one
 * another without a tensor between them; the products are spread over the threads of torch's own
 * OpenMP runtime, whose entry points are handed over at load (a second runtime would spin against
 * it). Without them, one thread does it all.
 *
 * Rows are bf16, rounded where the torch modules round; weights are int8 by rows, as reading them is
 * most of the time. A draft only proposes: what rounding may cost is acceptance, never the output.
 * See native_draft.py.
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

/* ---- y = x W^T: weights in one byte, each read once for all rows, rows in two ---- */

typedef struct {
    const int8_t *weight; /* [out, in], in 127ths of a row's largest */
    const float *scale;   /* [out] */
    const int32_t *sum;   /* [out], of a row's weights */
} Weight;

/* A row's numbers as 256 high + low - MIDDLE, times scale: bytes without a sign are what the
 * machine's dot product takes, and 16 bits are more than a bf16 has. */
typedef struct {
    uint8_t *high, *low; /* [rows, in] */
    float *scale;        /* [rows] */
} Rows;

#define MIDDLE 32768
#define PART (1 << 17) /* bytes of weights that make one more thread worth its waiting */
#define AHEAD 8192     /* bytes of weights fetched before they are needed */

typedef struct {
    Weight w;
    Rows x;
    void *y; /* [rows, out] */
    int64_t in, out, rows, is_bf16;
} Product;

/* NaN and infinity make the whole row NaN. */
static void split_row(const uint16_t *x, uint8_t *high, uint8_t *low, float *scale, int64_t n) {
    vec most = {0};
    ints bad = {0};
    for (int64_t i = 0; i < n; i += WIDTH) {
        vec v = load(x, i, 1);
        v = (vec)((bits)v & 0x7fffffffu);
        bad |= ~(v < splat(INFINITY));
        most = pick(v > most, v, most);
    }
    float top = 0;
    int any = 0;
    for (int lane = 0; lane < WIDTH; lane++) {
        top = most[lane] > top ? most[lane] : top;
        any |= bad[lane];
    }
    *scale = any ? NAN : top / 32512.0f;
    const float per = top > 0 && !any ? 32512.0f / top : 0;
    for (int64_t i = 0; i < n; i += WIDTH) {
        const vec v = any ? (vec){0} : load(x, i, 1) * per;
        /* The last 16 bits of the sum are the rounded number: such a float has no fraction. */
        const half whole = __builtin_convertvector((bits)(v + (12582912.0f + MIDDLE)) & 0xffff, half);
        const ubytes h = __builtin_convertvector(whole >> 8, ubytes);
        const ubytes l = __builtin_convertvector(whole & 0xff, ubytes);
        memcpy(high + i, &h, sizeof h);
        memcpy(low + i, &l, sizeof l);
    }
}

/* totals[j][k]: of `outputs` weights' rows from w on with `rows` rows. */
INLINE void dot_block(
    const int8_t *w, const uint8_t *high, const uint8_t *low, int64_t n, const int outputs,
    const int rows, int64_t totals[4][4]
) {
#ifdef __AVX512VNNI__
    __m512i h[4][4], l[4][4];
    for (int j = 0; j < outputs; j++)
        for (int k = 0; k < rows; k++) h[j][k] = l[j][k] = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 64) {
        const __mmask64 m = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        __m512i weight[4];
        for (int j = 0; j < outputs; j++) {
            weight[j] = _mm512_maskz_loadu_epi8(m, w + j * n + i);
            __builtin_prefetch(w + j * n + i + AHEAD); /* blocks follow one another in memory */
        }
        for (int k = 0; k < rows; k++) {
            const __m512i high_k = _mm512_maskz_loadu_epi8(m, high + k * n + i);
            const __m512i low_k = _mm512_maskz_loadu_epi8(m, low + k * n + i);
            for (int j = 0; j < outputs; j++) {
                h[j][k] = _mm512_dpbusd_epi32(h[j][k], high_k, weight[j]);
                l[j][k] = _mm512_dpbusd_epi32(l[j][k], low_k, weight[j]);
            }
        }
    }
    for (int j = 0; j < outputs; j++)
        for (int k = 0; k < rows; k++)
            totals[j][k] = 256 * (int64_t)_mm512_reduce_add_epi32(h[j][k]) +
                           _mm512_reduce_add_epi32(l[j][k]);
#else
    for (int j = 0; j < outputs; j++)
        for (int k = 0; k < rows; k++) {
            int32_t h = 0, l = 0;
            for (int64_t i = 0; i < n; i++) {
                h += (int32_t)high[k * n + i] * w[j * n + i];
                l += (int32_t)low[k * n + i] * w[j * n + i];
            }
            totals[j][k] = 256 * (int64_t)h + l;
        }
#endif
}

INLINE void product_block(
    const Product *p, int64_t o, int64_t r, const int outputs, const int rows
) {
    int64_t totals[4][4];
    dot_block(
        p->w.weight + o * p->in, p->x.high + r * p->in, p->x.low + r * p->in, p->in, outputs, rows,
        totals
    );
    for (int k = 0; k < rows; k++)
        for (int j = 0; j < outputs; j++) {
            const int64_t whole = totals[j][k] - MIDDLE * (int64_t)p->w.sum[o + j];
            const float y = (float)whole * p->w.scale[o + j] * p->x.scale[r + k];
            const int64_t to = (r + k) * p->out + o + j;
            if (p->is_bf16)
                ((uint16_t *)p->y)[to] = narrow(splat(y))[0];
            else
                ((float *)p->y)[to] = y;
        }
}

static void product_part(const void *job, int64_t first, int64_t end) {
    const Product *p = job;
    int64_t o = first;
    for (; o + 4 <= end; o += 4) {
        int64_t r = 0;
        for (; r + 2 <= p->rows; r += 2) product_block(p, o, r, 4, 2);
        if (r < p->rows) product_block(p, o, r, 4, 1);
    }
    for (; o < end; o++)
        for (int64_t r = 0; r < p->rows; r++) product_block(p, o, r, 1, 1);
}

/* Elements of 2 bytes that the split rows take. */
INLINE int64_t split_size(int64_t in, int64_t rows) { return rows * in + 2 * rows + 96; }

INLINE uint16_t *take(uint16_t **free, int64_t n) {
    uint16_t *taken = *free;
    *free += (n + 31) / 32 * 32; /* each begins at a cache line */
    return taken;
}

/* work: of split_size elements. */
static void product(
    Weight w, const uint16_t *x, void *y, int64_t is_bf16, int64_t in, int64_t out, int64_t rows,
    int64_t threads, uint16_t *work
) {
    uint8_t *high = (uint8_t *)take(&work, rows * in / 2), *low = (uint8_t *)take(&work, rows * in / 2);
    const Rows split = {high, low, (float *)take(&work, 2 * rows)};
    for (int64_t r = 0; r < rows; r++)
        split_row(x + r * in, high + r * in, low + r * in, split.scale + r, in);
    const Product p = {w, split, y, in, out, rows, is_bf16};
    const int64_t most = in * out / PART + 1;
    spread(product_part, &p, out, 4, threads < most ? threads : most);
}

void int8_product(
    const int8_t *weight, const float *scale, const int32_t *sum, const uint16_t *x, void *y,
    uint16_t *work, int64_t is_bf16, int64_t in, int64_t out, int64_t rows, int64_t threads
) {
    product((Weight){weight, scale, sum}, x, y, is_bf16, in, out, rows, threads, work);
}

/* ---- the step ---- */

typedef struct {
    const uint16_t *embed;                          /* [tokens, hidden] */
    const uint16_t *input_norm, *hidden_norm, *post_norm, *last_norm;
    Weight qkv, o, gate_up, down, head;
    const uint16_t *cos, *sin;                      /* [positions, rotary] */
    int64_t hidden, inner, heads, kv_heads, size, v_size, rotary, vocab;
    int64_t norm_before_residual, norm_output;
    float input_eps, hidden_eps, post_eps, last_eps;
} DraftPlan;

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
    product(p->qkv, pairs, qkv, 1, 2 * p->hidden, width, rows, threads, work);
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
    uint16_t *active = take(&work, rows * p->inner);

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
    product(p->o, mixed, delta, 1, o_width, n, rows, threads, work);
    add_rms_norm_bf16(residual, delta, p->post_norm, total, normed, rows, n, p->post_eps);
    product(p->gate_up, normed, gated, 1, n, 2 * p->inner, rows, threads, work);
    silu_mul_bf16(gated, active, rows, 2 * p->inner, p->inner);
    product(p->down, active, delta, 1, p->inner, n, rows, threads, work);
    /* The last sum is what is fed back, its norm what the head reads (or both are the norm). */
    add_rms_norm_bf16(total, delta, p->last_norm, residual, normed, rows, n, p->last_eps);
    memcpy(out, p->norm_output ? normed : residual, 2 * rows * n);
    product(p->head, normed, logits, 0, n, p->vocab, rows, threads, work);
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
                             p->hidden, 2 * p->inner, p->inner, q_width + kv_width, p->rotary,
                             p->rotary};
    int64_t total = 0, widest = 2 * p->hidden;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
        total += (rows * sizes[i] + 31) / 32 * 32;
    if (v_width > widest) widest = v_width;
    if (p->inner > widest) widest = p->inner;
    return total + split_size(widest, rows);
}
