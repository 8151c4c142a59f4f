/* Attention from a few query rows per sequence over pages, read in place; compiled by `compiler.py`, called by
   `attention.py`.

   The keys of a sequence are split at multiples of SPLIT, and a split of some KV heads is one work item. It goes through
   its keys in tiles, which the KV heads take in turns: the scores of a tile, their running maximum and sum, and the weighted
   values, for up to ROWS query heads of the group at once, so that a key is loaded once for all of them. Then the splits of
   a query are merged.

   A differential head has two keys and two values per token, in halves of the pool that lie `apart`. Half of its rows are
   multiplied with the first key, half with the second, and all with both values, as one value of twice the size.

   A key that no row of the call may see is not loaded, and one that only some rows may see is multiplied with no other
   row: such memory may hold NaN, and 0 * NaN is NaN.

   Vector types are those of GCC and Clang, as wide as the registers of the target processor. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define ROWS 4     /* query heads that are multiplied with a key at once: their sums stay in registers */
#define KEYS (LANES / ROWS) /* keys that are multiplied with them at once */
#define TILE 64    /* keys of a tile, a multiple of LANES */
#define SPLIT 1024 /* keys of a split, a multiple of TILE; as in attention.py */
#define ITEMS 4    /* work items that each thread should have, so that none waits long for the last ones */
#define SEVERAL 4  /* KV heads whose keys fill so much of a page of memory that it pays to take turns */
#define PREFETCH(p) __builtin_prefetch(p, 0, 2) /* into the L2 cache: in the first, two tiles would displace each other */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef int16_t signed_shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef float anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* an unaligned vector in memory */

enum { F32, BF16, F16, E4M3, E5M2, I8 };
static const int SIZES[] = {4, 2, 2, 1, 1, 1};

/* The fields are those of `Call` in attention.py. Strides are in elements. `size` is that of a key, `value_size` of a value in
   one half; an output has `halves` of them. */
typedef struct {
    const void *query, *key, *value;
    const int32_t *first_rows, *seq_lens, *table; /* first_rows: [b + 1], where the rows of each sequence begin */
    const float *key_scale, *slopes, *sinks;      /* NULL for none; key_scale: [n, p, hk] */
    void *out;
    float *lse;
    int64_t rows, seqs, heads, kv_heads, size, value_size, blocks, block_size, columns;
    int64_t query_strides[3], key_strides[4], value_strides[4], scale_strides[3], table_strides[2];
    int64_t left, right, splits, threads;
    int64_t halves, apart; /* 1; or 2, with pools of keys and of values `apart`, and query heads that alternate */
    int32_t query_type, key_type, value_type, out_type, sqrt_distance;
    float scale, softcap;
    int32_t failure; /* 1 if lengths and table do not match, 2 if memory is short */
} Call;

/* The running softmax of one row over a split: its highest score and the sum of exponentials. */
typedef struct {
    float max, sum;
    int sees; /* whether any key is visible */
} Softmax;

/* --- vectors: LANES elements of any type, as floats --- */

INLINE vec as_floats(ints bits) {
    vec x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE ints bits_of(vec x) {
    ints bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE vec where(ints condition, vec a, vec b) { return as_floats((bits_of(a) & condition) | (bits_of(b) & ~condition)); }

/* Widen a small float whose bits are in place already, and whose exponent bias is `shift` smaller; `first` is its smallest
   normal number, and subnormal ones are multiples of one unit. No step has a subnormal float32, which would take a
   processor a hundred cycles. */
INLINE vec widen(ints bits, ints is_small, int shift) {
    vec first = as_floats((ints){0} + ((shift + 1) << 23));
    return where(is_small, as_floats(bits + ((shift + 1) << 23)) - first, as_floats(bits + (shift << 23)));
}

INLINE vec half_to_float(ints bits) { /* float16 in the lower halves */
    ints magnitude = bits & 0x7fff, special = (ints)(magnitude >= 0x7c00) & 0x7f800000; /* inf and NaN */
    vec x = widen(magnitude << 13, (ints)(magnitude < 0x400), 112);
    return as_floats(bits_of(x) | special | (bits & 0x8000) << 16);
}

/* Bytes become shorts and then ints: in one step, GCC would widen them one by one. */
INLINE vec load(const char *p, int type) {
    if (type == F32)
        return *(const anywhere *)p;
    if (type == BF16 || type == F16) {
        shorts x;
        memcpy(&x, p, sizeof x);
        ints bits = __builtin_convertvector(x, ints);
        return type == BF16 ? as_floats(bits << 16) : half_to_float(bits);
    }
    if (type == I8) {
        signed_bytes x;
        memcpy(&x, p, sizeof x);
        return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, signed_shorts), ints), vec);
    }
    bytes x;
    memcpy(&x, p, sizeof x);
    ints bits = __builtin_convertvector(__builtin_convertvector(x, shorts), ints);
    if (type == E5M2)
        return half_to_float(bits << 8); /* the upper half of a float16 */
    ints magnitude = bits & 0x7f, nan = (ints)(magnitude == 0x7f) & 0x7fc00000;
    vec number = widen(magnitude << 20, (ints)(magnitude < 8), 120);
    return as_floats(bits_of(number) | nan | (bits & 0x80) << 24);
}

INLINE vec load_some(const char *p, int type, int64_t count) { /* count < LANES; zeros after them */
    char room[LANES * 4] = {0};
    memcpy(room, p, (size_t)(count * SIZES[type]));
    return load(room, type);
}

INLINE vec larger(vec a, vec b) { return where(a > b, a, b); } /* b where one is NaN */

/* Add two vectors into one: the halves of segments of 2h lanes are added, those of x before those of y. With h from
   LANES / 2 down to 1, this sums LANES vectors. */
#define LANE(o, h) ((o) / (h) < LANES / (2 * (h)) ? (o) / (h) * 2 * (h) + (o) % (h)                                     \
                                                   : LANES + ((o) / (h) - LANES / (2 * (h))) * 2 * (h) + (o) % (h))
#define FOUR(o, h, more) LANE(o, h) + more, LANE(o + 1, h) + more, LANE(o + 2, h) + more, LANE(o + 3, h) + more
#if LANES == 16
#define ALL(h, more) FOUR(0, h, more), FOUR(4, h, more), FOUR(8, h, more), FOUR(12, h, more)
#elif LANES == 8
#define ALL(h, more) FOUR(0, h, more), FOUR(4, h, more)
#else
#define ALL(h, more) FOUR(0, h, more)
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (ints){__VA_ARGS__})
#endif
#define ADD_HALVES(x, y, h) (SHUFFLE(x, y, ALL(h, 0)) + SHUFFLE(x, y, ALL(h, h)))

/* e to the power of x, for x up to 0 or so; NaN stays NaN. Polynomial: Cephes, expf. */
INLINE vec exponential(vec x) {
    ints vanishes = x < -87.3f;
    vec shifted = x * 1.44269504088896341f + 12582912.f; /* 1.5 * 2^23: rounds to an integer in the lowest bits */
    vec n = shifted - 12582912.f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f;
    vec y = p * r * r + r + 1.f;
    y = y * as_floats((bits_of(shifted) << 23) + 0x3f800000);
    return as_floats(bits_of(y) & ~vanishes);
}

static void store_one(char *p, float x, int type) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (type == F32) {
        memcpy(p, &x, 4);
        return;
    }
    uint16_t half;
    if (type == BF16) {
        half = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to even */
    } else {
        uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        if (x != x) {
            half = 0x7e00;
        } else if (magnitude >= 0x47800000) { /* 65536 and more */
            half = 0x7c00;
        } else if (magnitude < 0x38800000) { /* below 2^-14: multiples of 2^-24, which adding 0.5 rounds to */
            float small, y;
            memcpy(&small, &magnitude, 4);
            y = small + 0.5f;
            memcpy(&bits, &y, 4);
            half = (uint16_t)(bits - 0x3f000000);
        } else {
            half = (uint16_t)((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
        }
        half |= (uint16_t)sign;
    }
    memcpy(p, &half, 2);
}

/* --- one tile: some rows of queries, some keys --- */

/* The loops over rows and keys are unrolled by macros: an array of sums would lie in memory, not in registers. */
#define EACH(M) M(0) M(1) M(2) M(3)

/* Multiply `rows` queries, each `width` floats apart and padded with zeros, with `count` keys. Some scores of a row after
   its last one are written, too. Memory that is read next is prefetched. */
INLINE void products(const float *query, int64_t width, int rows, char *const *keys, int64_t count, int64_t size,
                     int type, float (*scores)[TILE], char *const *next, int64_t next_bytes) {
    for (int64_t j = 0; j < count; j += KEYS) {
#define DECLARE(r) vec s##r##0 = {0}, s##r##1 = s##r##0, s##r##2 = s##r##0, s##r##3 = s##r##0;
        EACH(DECLARE)
#define KEY(k) const char *key##k = keys[j + k % KEYS < count ? j + k % KEYS : count - 1];
        EACH(KEY)
        for (int64_t c = 0; c < size; c += LANES) {
            int64_t at = c * SIZES[type], rest = size - c;
#define LOAD(k) vec x##k = {0}; if (k < KEYS) x##k = rest >= LANES ? load(key##k + at, type) : load_some(key##k + at, type, rest);
            EACH(LOAD)
#define MULTIPLY(r)                                                                                                     \
    if (r < rows) {                                                                                                     \
        vec q = *(const anywhere *)(query + r * width + c);                                                               \
        s##r##0 += q * x0;                                                                                              \
        if (KEYS > 1) s##r##1 += q * x1;                                                                                \
        if (KEYS > 2) { s##r##2 += q * x2; s##r##3 += q * x3; }                                                         \
    }
            EACH(MULTIPLY)
        }
        for (int k = 0; next && k < KEYS && j + k < count; ++k)
            for (int64_t b = 0; b < next_bytes; b += 64)
                PREFETCH(next[j + k] + b);
#if LANES == 16
#define SUM(r) vec t##r = ADD_HALVES(ADD_HALVES(s##r##0, s##r##1, 8), ADD_HALVES(s##r##2, s##r##3, 8), 4);
#elif LANES == 8
#define SUM(r) vec t##r = ADD_HALVES(s##r##0, s##r##1, 4);
#else
#define SUM(r) vec t##r = s##r##0;
#endif
        EACH(SUM)
        vec sums = ADD_HALVES(ADD_HALVES(t0, t1, 2), ADD_HALVES(t2, t3, 2), 1);
        for (int r = 0; r < rows; ++r)
            memcpy(scores[r] + j, (const float *)&sums + r * KEYS, KEYS * sizeof(float));
    }
}

/* Rescale `sums` by a factor per row, and add the weighted values: `wide` vectors, 1 or 4, from column c on. */
INLINE void weigh_columns(float *sums, int64_t width, int rows, const float *factors, float (*weights)[TILE],
                          char *const *values, int64_t count, int64_t c, int wide, int64_t size, int type,
                          char *const *next, int64_t next_bytes) {
#define AT(r, w) (*(anywhere *)(sums + r * width + c + w * LANES))
#define RESCALE(r)                                                                                                      \
    vec s##r##0 = {0}, s##r##1 = s##r##0, s##r##2 = s##r##0, s##r##3 = s##r##0;                                         \
    if (r < rows) {                                                                                                     \
        s##r##0 = AT(r, 0) * factors[r];                                                                                \
        if (wide > 1) { s##r##1 = AT(r, 1) * factors[r]; s##r##2 = AT(r, 2) * factors[r]; s##r##3 = AT(r, 3) * factors[r]; } \
    }
    EACH(RESCALE)
    for (int64_t j = 0; j < count; ++j) {
        const char *value = values[j] + c * SIZES[type];
#define VALUE(w)                                                                                                        \
    vec x##w = {0};                                                                                                     \
    if (w < wide)                                                                                                       \
        x##w = wide > 1 || size - c >= LANES ? load(value + w * LANES * SIZES[type], type) : load_some(value, type, size - c);
        EACH(VALUE)
#define WEIGH(r)                                                                                                        \
    if (r < rows) {                                                                                                     \
        float weight = weights[r][j];                                                                                   \
        s##r##0 += weight * x0;                                                                                         \
        if (wide > 1) { s##r##1 += weight * x1; s##r##2 += weight * x2; s##r##3 += weight * x3; }                       \
    }
        EACH(WEIGH)
        if (next)
            for (int64_t b = 0; b < next_bytes; b += 64)
                PREFETCH(next[j] + b);
    }
#define KEEP(r)                                                                                                         \
    if (r < rows) {                                                                                                     \
        AT(r, 0) = s##r##0;                                                                                             \
        if (wide > 1) { AT(r, 1) = s##r##1; AT(r, 2) = s##r##2; AT(r, 3) = s##r##3; }                                   \
    }
    EACH(KEEP)
}

INLINE void weigh(float *sums, int64_t width, int rows, const float *factors, float (*weights)[TILE],
                  char *const *values, int64_t count, int64_t size, int type, char *const *next, int64_t next_bytes) {
    int64_t c = 0;
    for (; c + 4 * LANES <= size; c += 4 * LANES) {
        weigh_columns(sums, width, rows, factors, weights, values, count, c, 4, size, type, next, next_bytes);
        next = NULL;
    }
    for (; c < size; c += LANES) {
        weigh_columns(sums, width, rows, factors, weights, values, count, c, 1, size, type, next, next_bytes);
        next = NULL;
    }
}

/* One function for each type and number of rows, in which both are constants. */
#define OF_ROWS(call, type)                                                                                             \
    switch (rows) {                                                                                                     \
    case 1: call(1, type); break;                                                                                       \
    case 2: call(2, type); break;                                                                                       \
    case 3: call(3, type); break;                                                                                       \
    default: call(ROWS, type);                                                                                          \
    }
#define OF_TYPE(call)                                                                                                   \
    switch (type) {                                                                                                     \
    case F32: OF_ROWS(call, F32) break;                                                                                 \
    case BF16: OF_ROWS(call, BF16) break;                                                                               \
    case F16: OF_ROWS(call, F16) break;                                                                                 \
    case E4M3: OF_ROWS(call, E4M3) break;                                                                               \
    case E5M2: OF_ROWS(call, E5M2) break;                                                                               \
    default: OF_ROWS(call, I8)                                                                                          \
    }

static void multiply(const float *query, int64_t width, int rows, char *const *keys, int64_t count, int64_t size,
                     int type, float (*scores)[TILE], char *const *next, int64_t next_bytes) {
#define PRODUCTS(rows, type) products(query, width, rows, keys, count, size, type, scores, next, next_bytes)
    OF_TYPE(PRODUCTS)
}

static void add_values(float *sums, int64_t width, int rows, const float *factors, float (*weights)[TILE],
                       char *const *values, int64_t count, int64_t size, int type, char *const *next,
                       int64_t next_bytes) {
#define VALUES(rows, type) weigh(sums, width, rows, factors, weights, values, count, size, type, next, next_bytes)
    OF_TYPE(VALUES)
}

/* --- one split --- */

/* The tokens of a tile: where their keys and values lie, and their scales. */
typedef struct {
    char *keys[2][TILE], *values[2][TILE]; /* by half */
    float key_scales[TILE];
    int64_t first, count;
} Tile;

/* Point `rows` to the contiguous elements of some tokens of a block; copied to `room` if the pool has other strides. */
static void find_rows(const void *pool, int type, const int64_t *strides, int64_t block, int64_t place, int64_t head,
                      int64_t size, int64_t count, char *room, char **rows) {
    int64_t bytes = SIZES[type];
    char *p = (char *)pool + (block * strides[0] + place * strides[1] + head * strides[2]) * bytes;
    for (int64_t j = 0; j < count; ++j, p += strides[1] * bytes, room += size * bytes) {
        rows[j] = p;
        if (strides[3] != 1) {
            for (int64_t i = 0; i < size; ++i)
                memcpy(room + i * bytes, p + i * strides[3] * bytes, (size_t)bytes);
            rows[j] = room;
        }
    }
}

/* Look up the tokens of a tile, from `first` to before `end`; returns 0 if the table names no block of the pool. */
static int look_up(const Call *call, int64_t sequence, int64_t kv_head, int64_t first, int64_t end, char *room, Tile *tile) {
    tile->first = first;
    tile->count = end - first < TILE ? end - first : TILE;
    int64_t key_bytes = SIZES[call->key_type], value_bytes = SIZES[call->value_type];
    char *value_room = room + TILE * call->halves * call->size * key_bytes;
    for (int64_t j = 0; j < tile->count;) {
        int64_t column = (first + j) / call->block_size, place = (first + j) % call->block_size;
        int64_t block = call->table[sequence * call->table_strides[0] + column * call->table_strides[1]];
        int64_t count = call->block_size - place < tile->count - j ? call->block_size - place : tile->count - j;
        if (block < 0 || block >= call->blocks)
            return 0;
        for (int64_t half = 0; half < call->halves; ++half) {
            const char *keys = (const char *)call->key + half * call->apart * key_bytes;
            const char *values = (const char *)call->value + half * call->apart * value_bytes;
            find_rows(keys, call->key_type, call->key_strides, block, place, kv_head, call->size, count,
                      room + (half * TILE + j) * call->size * key_bytes, tile->keys[half] + j);
            find_rows(values, call->value_type, call->value_strides, block, place, kv_head, call->value_size, count,
                      value_room + (half * TILE + j) * call->value_size * value_bytes, tile->values[half] + j);
        }
        for (int64_t k = 0; call->key_scale && k < count; ++k)
            tile->key_scales[j + k] = call->key_scale[block * call->scale_strides[0] +
                                                      (place + k) * call->scale_strides[1] + kv_head * call->scale_strides[2]];
        j += count;
    }
    return 1;
}

/* Apply options to the scores of one row: the scale of each key, a softcap, ALiBi; the first key is `distance` before it. */
static void apply_options(const Call *call, float *scores, int64_t count, const float *key_scales, int64_t head,
                          int64_t distance) {
    for (int64_t j = 0; call->key_scale && j < count; ++j)
        scores[j] *= key_scales[j];
    for (int64_t j = 0; call->softcap > 0.f && j < count; ++j)
        scores[j] = call->softcap * tanhf(scores[j] / call->softcap);
    for (int64_t j = 0; call->slopes && j < count; ++j) {
        float far = (float)llabs(distance - j);
        scores[j] -= call->slopes[head] * (call->sqrt_distance ? sqrtf(far) : far);
    }
}

/* Update the running softmax of one row by a tile; returns the factor that rescales earlier sums. The scores become
   weights, and the rest of the last vector zeros. NaN is left out of the maximum: it reaches the sum. */
static float update_softmax(float *scores, int64_t count, Softmax *softmax) {
    float max = softmax->max;
    vec highest = max - (vec){0}, sums = {0}, x;
    for (int64_t j = count; j < (count + LANES - 1) / LANES * LANES; ++j)
        scores[j] = -INFINITY;
    for (int64_t j = 0; j < count; j += LANES) {
        memcpy(&x, scores + j, sizeof x);
        highest = larger(x, highest);
    }
    for (int k = 0; k < LANES; ++k)
        max = highest[k] > max ? highest[k] : max;
    float shift = max == -INFINITY ? 0.f : max;
    for (int64_t j = 0; j < count; j += LANES) {
        memcpy(&x, scores + j, sizeof x);
        x = exponential(x - shift);
        memcpy(scores + j, &x, sizeof x);
        sums += x;
    }
    float factor = softmax->max == max ? 1.f : expf(softmax->max - shift), sum = 0.f;
    for (int k = 0; k < LANES; ++k)
        sum += sums[k];
    softmax->max = max;
    softmax->sees = 1;
    softmax->sum = softmax->sum * factor + sum;
    return factor;
}

typedef struct {
    float *query, *sums; /* [rows of a sequence, width]; `query` is scaled */
    Softmax *softmax;    /* [rows of a sequence] */
    char *copies[2];     /* for the tokens of two tiles, of keys and of values */
    float *floats;       /* for the tokens of one tile, as floats */
} Room;

static int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t smallest(int64_t a, int64_t b) { return a < b ? a : b; }

/* Clip the keys from `first` to before `end` to those that the query at a position sees, if any. */
static void clip_to_window(const Call *call, int64_t position, int64_t *first, int64_t *end) {
    if (call->left >= 0)
        *first = largest(*first, position - call->left);
    if (call->right >= 0)
        *end = smallest(*end, position + call->right + 1);
}

/* Return the query head of a row of a KV head: rows of the first half come first, and heads of the halves alternate. */
static int64_t head_of(const Call *call, int64_t kv_head, int64_t row) {
    int64_t group = call->heads / call->kv_heads, of_half = group / call->halves;
    return kv_head * group + row % of_half * call->halves + row / of_half;
}

/* Convert rows to floats, each `width` apart, and point `rows` to them; memory that is read next is prefetched. */
static void as_float_rows(char **rows, int type, int64_t size, int64_t count, float *floats, int64_t width, char *const *next,
                          int64_t next_bytes) {
    for (int64_t j = 0; j < count; ++j, floats += width) {
        for (int64_t b = 0; next && b < next_bytes; b += 64)
            PREFETCH(next[j] + b);
        for (int64_t c = 0; c < size; c += LANES) {
            const char *p = rows[j] + c * SIZES[type];
            *(anywhere *)(floats + c) = size - c >= LANES ? load(p, type) : load_some(p, type, size - c);
        }
        rows[j] = (char *)floats;
    }
}

/* Load the query rows of a sequence and a KV head as floats, scaled, each `width` apart and padded with zeros. */
static void load_queries(const Call *call, int64_t first_row, int64_t queries, int64_t kv_head, float *row, int64_t width) {
    int64_t group = call->heads / call->kv_heads, bytes = SIZES[call->query_type];
    for (int64_t i = 0; i < queries; ++i)
        for (int64_t g = 0; g < group; ++g, row += width) {
            const char *p = (const char *)call->query + ((first_row + i) * call->query_strides[0] +
                            head_of(call, kv_head, g) * call->query_strides[1]) * bytes;
            int64_t apart = call->query_strides[2] * bytes, c = 0;
            if (call->query_strides[2] == 1)
                for (; c + LANES <= call->size; c += LANES) {
                    vec x = load(p + c * apart, call->query_type) * call->scale;
                    memcpy(row + c, &x, sizeof x);
                }
            for (; c < call->size; ++c)
                row[c] = load_some(p + c * apart, call->query_type, 1)[0] * call->scale;
            memset(row + call->size, 0, (size_t)(width - call->size) * sizeof(float));
        }
}

/* Attend from the rows of one sequence and some KV heads, from `kv_head` on, to the keys of one split; returns 0 if no row
   sees any of them, -1 if the table names no block of the pool. The heads take turns, tile by tile: keys of all heads lie
   side by side, so memory is read from page to page. `apart` rows are between those of two heads in `sums`, `softmax`. */
static int attend_to_split(const Call *call, int64_t sequence, int64_t kv_head, int64_t num_heads, int64_t split,
                           float *all_sums, Softmax *all_softmax, int64_t apart, const Room *room) {
    int64_t group = call->heads / call->kv_heads, first_row = call->first_rows[sequence];
    int64_t queries = call->first_rows[sequence + 1] - first_row, length = call->seq_lens[sequence];
    int64_t of_half = group / call->halves, part_width = padded(call->value_size);
    int64_t width = padded(call->size), value_width = call->halves * part_width;
    int64_t begin = split * SPLIT, stop = smallest(begin + SPLIT, length), seen_from = stop, seen_to = begin;
    for (int64_t i = 0; begin < stop && i < queries; ++i) {
        int64_t first = begin, end = stop;
        clip_to_window(call, length - queries + i, &first, &end);
        if (first < end) {
            seen_from = smallest(seen_from, first);
            seen_to = largest(seen_to, end);
        }
    }
    if (begin >= stop || seen_from >= seen_to)
        return 0;

    int64_t rows_of_head = queries * group, head = 0;
    for (int64_t h = 0; h < num_heads; ++h) {
        load_queries(call, first_row, queries, kv_head + h, room->query + h * rows_of_head * width, width);
        memset(all_sums + h * apart * value_width, 0, (size_t)(rows_of_head * value_width) * sizeof(float));
        for (int64_t r = 0; r < rows_of_head; ++r)
            all_softmax[h * apart + r] = (Softmax){-INFINITY, 0.f, 0};
    }

    float scores[ROWS][TILE] __attribute__((aligned(64)));
    Tile tiles[2];
    int64_t key_bytes = call->size * SIZES[call->key_type], value_bytes = call->value_size * SIZES[call->value_type];
    int many = queries * ((group + ROWS - 1) / ROWS) > 1; /* several groups of rows: keys become floats once for all */
    int key_type = many ? F32 : call->key_type, value_type = many ? F32 : call->value_type;
    int share = call->halves == 1 && call->key == call->value && call->key_type == call->value_type &&
                call->value_size <= call->size && /* latents */
                !memcmp(call->key_strides, call->value_strides, sizeof call->key_strides);
    if (!look_up(call, sequence, kv_head, seen_from, seen_to, room->copies[0], &tiles[0]))
        return -1;
    for (int number = 0; tiles[number].count > 0; number = !number) {
        Tile *tile = &tiles[number], *next = &tiles[!number];
        const float *query = room->query + head * rows_of_head * width;
        float *sums = all_sums + head * apart * value_width;
        Softmax *softmax = all_softmax + head * apart;
        int64_t this_head = kv_head + head, next_first = tile->first;
        if (++head == num_heads) { /* the tile has had its turn with all of them */
            head = 0;
            next_first += tile->count;
        }
        if (!look_up(call, sequence, kv_head + head, next_first, seen_to, room->copies[!number], next))
            return -1;
        for (int64_t half = 0; many && half < call->halves; ++half) {
            float *floats = room->floats + half * TILE * (width + part_width);
            if (call->key_type != F32)
                as_float_rows(tile->keys[half], call->key_type, call->size, tile->count, floats, width,
                              share ? NULL : tile->values[half], value_bytes);
            if (share)
                memcpy(tile->values[half], tile->keys[half], sizeof tile->keys[half]);
            else if (call->value_type != F32)
                as_float_rows(tile->values[half], call->value_type, call->value_size, tile->count, floats + TILE * width,
                              part_width, NULL, 0);
        }
        for (int64_t i = 0; i < queries; ++i) {
            int64_t position = length - queries + i, first = tile->first, end = tile->first + tile->count;
            clip_to_window(call, position, &first, &end);
            int64_t from = first - tile->first, num_keys = end - first;
            if (num_keys <= 0)
                continue;
            for (int64_t g = 0; g < group; g += ROWS) {
                int rows = (int)smallest(ROWS, group - g), is_first = i == 0 && g == 0;
                int64_t r0 = i * group + g;
                float factors[ROWS];
                for (int r = 0, some; r < rows; r += some) { /* rows of one half, which share keys */
                    int64_t half = (g + r) / of_half;
                    some = (int)smallest(rows - r, (half + 1) * of_half - g - r);
                    multiply(query + (r0 + r) * width, width, some, tile->keys[half] + from, num_keys, call->size,
                             key_type, scores + r, is_first ? tile->values[half] + from : NULL, value_bytes);
                }
                for (int r = 0; r < rows; ++r) {
                    apply_options(call, scores[r], num_keys, tile->key_scales + from, head_of(call, this_head, g + r),
                                  position - first);
                    factors[r] = update_softmax(scores[r], num_keys, softmax + r0 + r);
                }
                for (int64_t half = 0; half < call->halves; ++half)
                    add_values(sums + r0 * value_width + half * part_width, value_width, rows, factors, scores,
                               tile->values[half] + from, num_keys, call->value_size, value_type,
                               is_first && next->count >= num_keys ? next->keys[half] : NULL, key_bytes);
            }
        }
    }
    return 1;
}

/* --- a sequence --- */

/* Merge the used splits of one row, in place, add its sink, and write its output and its log-sum-exp. */
static void finish(const Call *call, int64_t row, int64_t head, int64_t splits, const int32_t *used, float *sums,
                   int64_t sums_apart, const Softmax *softmax, int64_t softmax_apart) {
    float max = call->sinks ? call->sinks[head] : -INFINITY, sum = 0.f, *merged = NULL;
    int64_t part_width = padded(call->value_size), bytes = SIZES[call->out_type];
    int sees = 0;
    for (int64_t s = 0; s < splits; ++s)
        if (used[s] && softmax[s * softmax_apart].max > max)
            max = softmax[s * softmax_apart].max;
    float shift = max == -INFINITY ? 0.f : max;
    for (int64_t s = 0; s < splits; ++s)
        if (used[s]) {
            float factor = expf(softmax[s * softmax_apart].max - shift), *part = sums + s * sums_apart;
            sum += softmax[s * softmax_apart].sum * factor;
            sees |= softmax[s * softmax_apart].sees;
            for (int64_t c = 0; c < call->halves * part_width; ++c)
                part[c] = part[c] * factor + (merged ? merged[c] : 0.f);
            merged = part;
        }
    if (call->sinks)
        sum += expf(call->sinks[head] - shift);
    call->lse[row * call->heads + head] = sum == 0.f ? -INFINITY : shift + logf(sum);
    float nothing = sees ? NAN : 0.f; /* where all visible scores are -inf, their weights are 0 / 0 */
    char *out = (char *)call->out + (row * call->heads + head) * call->halves * call->value_size * bytes;
    for (int64_t half = 0; half < call->halves; ++half)
        for (int64_t c = 0; c < call->value_size; ++c, out += bytes)
            store_one(out, sum == 0.f ? nothing : merged ? merged[half * part_width + c] / sum : 0.f, call->out_type);
}

void attend(Call *call) {
    int64_t group = call->heads / call->kv_heads, width = padded(call->size);
    int64_t value_width = call->halves * padded(call->value_size);
    int64_t out_bytes = call->halves * call->value_size * SIZES[call->out_type];
    int64_t rows = 0, pieces = call->seqs * call->kv_heads, splits = call->splits;
    size_t lengths = (size_t)call->seqs * sizeof(int32_t);
    int32_t *first_rows = malloc(lengths + sizeof(int32_t)), *seq_lens = malloc(lengths + 1);
    if (!first_rows || !seq_lens) {
        free(first_rows);
        free(seq_lens);
        call->failure = 2;
        return;
    }
    memcpy(first_rows, call->first_rows, lengths + sizeof(int32_t)); /* checked below; must not change after that */
    memcpy(seq_lens, call->seq_lens, lengths);
    call->first_rows = first_rows;
    call->seq_lens = seq_lens;
    call->failure = first_rows[0] != 0;
    for (int64_t b = 0; b < call->seqs; ++b) {
        int64_t queries = call->first_rows[b + 1] - call->first_rows[b];
        rows = largest(rows, queries * group);
        if (queries > 0 && call->seq_lens[b] > smallest(call->columns * call->block_size, splits * SPLIT))
            call->failure = 1;
        if (queries < 0 || call->first_rows[b + 1] > call->rows || call->seq_lens[b] < 0)
            call->failure = 1;
    }
    if (call->failure) {
        free(first_rows);
        free(seq_lens);
        return;
    }
    int64_t real = call->seqs ? call->first_rows[call->seqs] : 0, padding = (call->rows - real) * call->heads;
    memset((char *)call->out + real * call->heads * out_bytes, 0, (size_t)(padding * out_bytes));
    for (int64_t i = real * call->heads; i < call->rows * call->heads; ++i)
        call->lse[i] = -INFINITY;
    float *sums = malloc((size_t)(pieces * splits * rows * value_width) * sizeof(float) + 1);
    Softmax *softmax = malloc((size_t)(pieces * splits * rows) * sizeof(Softmax) + 1);
    int32_t *used = calloc((size_t)(pieces * splits) + 1, sizeof(int32_t));
    int short_of_memory = !sums || !softmax || !used;
    int64_t at_once = call->kv_heads < SEVERAL ? 1 : call->kv_heads; /* KV heads of a work item, if each thread has a few */
    while (at_once > 1 && (call->kv_heads % at_once || pieces * splits / at_once < ITEMS * call->threads))
        --at_once;
#pragma omp parallel num_threads(call->threads)
    {
        int64_t token = call->size * SIZES[call->key_type] + call->value_size * SIZES[call->value_type];
        size_t tile = (size_t)(TILE * call->halves * token);
        Room room = {.query = malloc((size_t)(at_once * rows * width) * sizeof(float) + 1), .copies = {malloc(tile + 1), malloc(tile + 1)},
                     .floats = malloc((size_t)(TILE * (call->halves * width + value_width)) * sizeof(float) + 1)};
        if (!room.query || !room.copies[0] || !room.copies[1] || !room.floats)
#pragma omp atomic write
            short_of_memory = 1;
#pragma omp barrier
        if (!short_of_memory) {
#pragma omp for schedule(dynamic)
            for (int64_t k = 0; k < pieces * splits / at_once; ++k) {
                int64_t turns = call->kv_heads / at_once, sequence = k / turns / splits, split = k / turns % splits;
                int64_t kv_head = k % turns * at_once, at = (sequence * call->kv_heads + kv_head) * splits + split;
                if (call->first_rows[sequence] < call->first_rows[sequence + 1]) {
                    int found = attend_to_split(call, sequence, kv_head, at_once, split, sums + at * rows * value_width,
                                                softmax + at * rows, splits * rows, &room);
                    for (int64_t h = 0; h < at_once; ++h)
                        used[at + h * splits] = found > 0;
                    if (found < 0)
#pragma omp atomic write
                        call->failure = 1;
                }
            }
#pragma omp for schedule(dynamic)
            for (int64_t piece = 0; piece < pieces; ++piece) {
                int64_t sequence = piece / call->kv_heads, kv_head = piece % call->kv_heads;
                int64_t first_row = call->first_rows[sequence], queries = call->first_rows[sequence + 1] - first_row;
                for (int64_t r = 0; r < queries * group; ++r)
                    finish(call, first_row + r / group, head_of(call, kv_head, r % group), splits, used + piece * splits,
                           sums + (piece * splits * rows + r) * value_width, rows * value_width,
                           softmax + piece * splits * rows + r, rows);
            }
        }
        free(room.query);
        free(room.copies[0]);
        free(room.copies[1]);
        free(room.floats);
    }
    free(sums);
    free(softmax);
    free(used);
    free(first_rows);
    free(seq_lens);
    if (short_of_memory)
        call->failure = 2;
}
