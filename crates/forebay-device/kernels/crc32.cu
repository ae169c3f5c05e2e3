// CRC-32 (ISO-HDLC, the one of zip) of many blocks of device memory, at the rate of that memory.
//
// The usual ways want tables (conflicts between the banks of shared memory) or carry-less multiplication (GPUs have
// none). This one has neither; it is some seven operations on registers for each word.
//
// 1. A message is a polynomial over GF(2), its CRC the remainder by P. Squaring is linear there, so P(x)^(2^n) =
//    P(x^(2^n)): a message may be reduced by P(y) first, y = x^8192, which P divides. That is the shift register of P
//    with its taps a KiB apart. A CTA of 256 threads reads a KiB, a row, at a time, one word a thread; each thread runs
//    32 of the registers at once, one in each bit of its words, and needs no word of another thread.
//    `r` is the register, r[k] the coefficient of y^k: 14 XORs a word, two of which make one LOP3.
// 2. At the end r[0] + r[1] y + ... + r[31] y^31 is brought to 32 bits. The y^k mod P are constants. With c[k][j] as
//    bit x^j of y^k, that is the sum over j of x^j * (sum of the r[k] whose c[k][j] is set): XORs that the compiler
//    knows, and 32 multiplications with x.
// 3. Each thread's remainder is multiplied with x^(8n), n the bytes from its last word to the end of the block (from a
//    table), and all are added.
//
// Zeros in front of a message change nothing when the register starts at 0, so blocks are filled up in front to whole
// groups of 32 rows. That the register of this CRC starts with all ones is the same as four certain bytes in front
// (PREFIX). The end is filled up to a whole word, and the factor of step 3 divides by that again. Nothing outside of a
// block is read: words that it covers in part are put together from bytes.
//
// Bits: as the CRC is reflected, bit 31 of a word is x^0 and bit 0 is x^31.
//
// A CTA takes a block, then the one that is `gridDim.x` further on. No dynamic shared memory. For sm_90 the loop has some
// 300 instructions for 32 words; at two a clock a multiprocessor is good for 27 bytes a clock, which is more than its
// share of the memory's rate.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum : u32 {
    // Reflected, and with bit k as x^k.
    POLYNOMIAL = 0xEDB88320u,
    TAPS = 0x04C11DB7u,
    ONE = 0x80000000u,
};

enum : int {
    THREADS = 256,
    WARPS = THREADS / 32,
    ROW_BYTES = 4 * THREADS,
    // As many rows as the register has words: after a group each word is in its place again.
    GROUP_ROWS = 32,
    GROUP_BYTES = GROUP_ROWS * ROW_BYTES,
};

struct Block {
    u64 address;
    u64 bytes;
};

__device__ constexpr u32 times_x(u32 a) {
    return (a >> 1) ^ (a & 1 ? POLYNOMIAL : 0);
}

__device__ constexpr u32 divided_by_x(u32 a) {
    return a >> 31 ? ((a ^ POLYNOMIAL) << 1) | 1 : a << 1;
}

__device__ constexpr u32 multiply(u32 a, u32 b) {
    u32 product = 0;
    for (int i = 0; i < 32; i++) {
        product ^= b << i >> 31 ? a : 0;
        a = times_x(a);
    }
    return product;
}

// What 4 bytes leave all ones in a register that was 0: all ones divided by x^32.
__device__ constexpr u32 prefix() {
    u32 a = 0xFFFFFFFFu;
    for (int i = 0; i < 32; i++) a = divided_by_x(a);
    return a;
}

enum : u32 { PREFIX = prefix() };

template <int N>
struct Table {
    u32 at[N];
};

// at[k] = y^k, y = x^(8 * ROW_BYTES), which is x squared again and again.
__device__ constexpr Table<32> row_powers() {
    u32 y = ONE >> 1;
    for (int bits = 8 * ROW_BYTES; bits > 1; bits /= 2) y = multiply(y, y);
    Table<32> powers{};
    u32 a = ONE;
    for (int k = 0; k < 32; k++) {
        powers.at[k] = a;
        a = multiply(a, y);
    }
    return powers;
}

// at[n - 1] = x^(8n), for n from 1 to ROW_BYTES.
__device__ constexpr Table<ROW_BYTES> byte_powers() {
    Table<ROW_BYTES> powers{};
    u32 a = ONE;
    for (int n = 0; n < ROW_BYTES; n++) {
        for (int i = 0; i < 8; i++) a = times_x(a);
        powers.at[n] = a;
    }
    return powers;
}

__device__ const Table<ROW_BYTES> BYTE_POWERS = byte_powers();

// The word `at` bytes behind the start of a block that covers only some of its bytes, or of PREFIX in front of it.
__device__ u32 edge_word(u64 start, i64 bytes, i64 at) {
    u32 word = 0;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        const i64 byte_at = at + i;
        u32 byte = 0;
        if (byte_at < 0) {
            if (byte_at >= -4) byte = PREFIX >> (8 * static_cast<int>(byte_at + 4)) & 255;
        } else if (byte_at < bytes) {
            byte = *reinterpret_cast<const unsigned char*>(start + byte_at);
        }
        word |= byte << (8 * i);
    }
    return word;
}

// A thread's words of a group in the middle of a block, oldest first. `at`: its first, in bytes behind the start.
__device__ __forceinline__ void load(u32 (&words)[GROUP_ROWS], u64 start, i64 at) {
    const char* place = reinterpret_cast<const char*>(start + at);
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++) {
        words[i] = __ldcs(reinterpret_cast<const u32*>(place + i * ROW_BYTES));
    }
}

// The same for a group that holds an end of the block. Rows from `first` to before `end` are whole words of the block,
// the row before and the row `end` may be in part; all others are zeros.
__device__ __forceinline__ void load_edge(u32 (&words)[GROUP_ROWS], u64 start, i64 bytes, i64 at) {
    const i64 before = at < 0 ? (ROW_BYTES - 1 - at) / ROW_BYTES : 0;
    const i64 up_to = bytes - 4 < at ? 0 : (bytes - 4 - at) / ROW_BYTES + 1;
    const int first = before < GROUP_ROWS ? static_cast<int>(before) : GROUP_ROWS;
    const int end = up_to < GROUP_ROWS ? static_cast<int>(up_to) : GROUP_ROWS;
    const i64 front_at = at + (first - 1) * ROW_BYTES, tail_at = at + end * ROW_BYTES;
    u32 front = 0, tail = 0;
    if (first > 0 && front_at > -8) front = edge_word(start, bytes, front_at);
    if (tail_at >= 0 && tail_at < bytes && end < GROUP_ROWS) tail = edge_word(start, bytes, tail_at);
    const char* place = reinterpret_cast<const char*>(start + at);
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++) {
        u32 word = i == first - 1 ? front : 0;
        if (i == end) word |= tail;
        if (i >= first && i < end) word = __ldcs(reinterpret_cast<const u32*>(place + i * ROW_BYTES));
        words[i] = word;
    }
}

// Step 1: r = (r * y^32 + words) mod P(y).
__device__ __forceinline__ void shift_in(u32 (&r)[32], const u32 (&words)[GROUP_ROWS]) {
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++) {
        const u32 out = r[31];
#pragma unroll
        for (int k = 31; k > 0; k--) r[k] = TAPS >> k & 1 ? r[k - 1] ^ out : r[k - 1];
        r[0] = words[i] ^ out;
    }
}

// Step 2: the register's value mod P.
__device__ __forceinline__ u32 value(const u32 (&r)[32]) {
    constexpr Table<32> powers = row_powers();
    u32 sum = 0;
#pragma unroll
    for (int j = 31; j >= 0; j--) {
        sum = times_x(sum);
#pragma unroll
        for (int k = 0; k < 32; k++) {
            if (powers.at[k] >> (31 - j) & 1) sum ^= r[k];
        }
    }
    return sum;
}

// The remainder of what one thread reads, at its place in the block.
__device__ __forceinline__ u32 thread_sum(u64 start, i64 bytes, int pad, int thread) {
    const i64 end = bytes + pad;
    // The warp's last word, of the last row: in front of PREFIX, as are all others then.
    if (end - ROW_BYTES + 4 * (thread | 31) <= -8) return 0;
    u32 words[GROUP_ROWS], r[32] = {};
#pragma unroll 1
    for (i64 left = (4 + end + GROUP_BYTES - 1) / GROUP_BYTES; left > 0; left--) {
        const i64 group = end - left * GROUP_BYTES;
        if (group >= 0 && group + GROUP_BYTES <= bytes) {
            load(words, start, group + 4 * thread);
        } else {
            load_edge(words, start, bytes, group + 4 * thread);
        }
        shift_in(r, words);
    }
    return multiply(value(r), BYTE_POWERS.at[ROW_BYTES - 4 * thread - pad - 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
forebay_crc32(const Block* blocks, u32* crcs, u32 count) {
    __shared__ u32 sums[WARPS];
    const int thread = threadIdx.x;
    for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
        const u64 start = blocks[index].address;
        const i64 bytes = static_cast<i64>(blocks[index].bytes);
        const int pad = static_cast<int>(-(start + bytes) & 3);
        u32 sum = thread_sum(start, bytes, pad, thread);
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) sum ^= __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
        if ((thread & 31) == 0) sums[thread / 32] = sum;
        __syncthreads();
        if (thread == 0) {
            u32 all = 0xFFFFFFFFu;
#pragma unroll
            for (int i = 0; i < WARPS; i++) all ^= sums[i];
            crcs[index] = all;
        }
        __syncthreads();
    }
}
