// SPDX-License-Identifier: Apache-2.0
// Does a dispatch tail lose rows? Two GPUs of one host, no library: nvcc -arch=sm_90 -o tail
// tail.cu
//
// tail [RUNS] [ROUNDS]   (8 runs of 400,000 rounds: five minutes)
//
// The producer's CTAs each store a row into the other GPU's memory, every vector stamped with the
// number of the round. They count themselves; the last one raises a flag there. The consumer waits
// for the flag and counts 16-byte vectors that still have the stamp of an earlier round. Both GPUs
// fill the link with other stores meanwhile. Exit status: 0 if every form did what PTX promises.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr unsigned ctas = 100, threads = 512;
constexpr unsigned vectors = 14336 / sizeof(uint4);  // of a row: 7168 bf16
constexpr unsigned noise_ctas = 32, noise_threads = 1024;
constexpr size_t noise_vectors = (size_t(64) << 20) / sizeof(uint4);  // more than the L2 holds
constexpr uint64_t limit_ns = 60'000'000'000;  // of one kernel: nothing hangs

enum Form {
    relaxed,     // a relaxed counter; the last CTA alone fences, at system scope (litmus test A11)
    fenced,      // the same, and every CTA fences at GPU scope before it counts itself (A12)
    acq_rel,     // a counter that releases and acquires, then a flag that releases (A4)
    flag_first,  // the flag before the rows: shows that stale vectors are noticed
};
constexpr const char* names[] = {
    "relaxed counter, the last CTA fences",
    "a fence in every CTA, relaxed counter",
    "acq_rel counter, release flag",
    "the flag before the rows",
};

// One word alone in its line.
struct alignas(128) Word {
    unsigned value;
};

// The words of one GPU.
struct Board {
    Word flag;     // at the consumer: the round whose rows have been stored
    Word go;       // at the producer: the round whose rows have been read
    Word counter;  // CTAs of the running round
    Word left;     // CTAs that have ended
    Word over;     // this GPU's kernel has ended: its other stores may end, too
    Word late;     // CTAs that gave up
    alignas(128) unsigned long long stale;
};

__device__ uint64_t now_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
__device__ unsigned load_acquire(const unsigned* p) {
    unsigned v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ void store_release(unsigned* p, unsigned v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ void store_relaxed(unsigned* p, unsigned v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ unsigned add_acq_rel(unsigned* p) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
__device__ unsigned add_relaxed(unsigned* p) {
    unsigned before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
__device__ void store_row(uint4* p, unsigned v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(p), "r"(v)
                 : "memory");
}
__device__ uint4 load_row(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// The whole CTA waits for a round; false, for all of it, at the deadline.
__device__ bool await(const Word& word, unsigned round, uint64_t deadline) {
    int arrived = 1;
    if (threadIdx.x == 0)
        while (int(load_acquire(&word.value) - round) < 0)
            if (now_ns() > deadline) {
                arrived = 0;
                break;
            }
    return __syncthreads_and(threadIdx.x != 0 || arrived);
}

// The last CTA to come raises `flag`, in a way that orders what all of them did before.
__device__ void publish(Word& counter, Word& flag, unsigned round) {
    __syncthreads();
    if (threadIdx.x != 0 || add_acq_rel(&counter.value) != gridDim.x - 1) return;
    counter.value = 0;
    store_release(&flag.value, round);
}

// The tail in question; `fence` adds what it lacks.
__device__ void publish_relaxed(Word& counter, Word& flag, unsigned round, bool fence) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (fence) asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (add_relaxed(&counter.value) != gridDim.x - 1) return;
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(&counter.value) : "memory");
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    store_relaxed(&flag.value, round);
}

__device__ void leave(Board& own, unsigned last, bool in_time) {
    if (!in_time && threadIdx.x == 0) atomicAdd(&own.late.value, 1u);
    publish(own.left, own.over, last);
}

template <Form form>
__global__ void produce(Board* own, Board* peer, uint4* rows, unsigned first, unsigned rounds) {
    const uint64_t deadline = now_ns() + limit_ns;
    uint4* row = rows + size_t(blockIdx.x) * vectors;
    bool in_time = true;
    for (unsigned round = first + 1; in_time && round != first + rounds + 1; ++round) {
        in_time = await(own->go, round - 1, deadline);
        if (!in_time) break;
        if (form == flag_first) publish(own->counter, peer->flag, round);
        for (unsigned v = threadIdx.x; v < vectors; v += blockDim.x) store_row(row + v, round);
        if (form == acq_rel) publish(own->counter, peer->flag, round);
        if (form == relaxed || form == fenced)
            publish_relaxed(own->counter, peer->flag, round, form == fenced);
    }
    leave(*own, first + rounds, in_time);
}

// Reads another CTA's row, last vector first: what was stored last is what would be missing.
__global__ void consume(Board* own, Board* peer, const uint4* rows, unsigned first,
                        unsigned rounds) {
    const uint64_t deadline = now_ns() + limit_ns;
    const uint4* row = rows + size_t(gridDim.x - 1 - blockIdx.x) * vectors;
    unsigned long long stale = 0;
    bool in_time = true;
    for (unsigned round = first + 1; in_time && round != first + rounds + 1; ++round) {
        in_time = await(own->flag, round, deadline);
        if (!in_time) break;
        for (unsigned v = threadIdx.x; v < vectors; v += blockDim.x) {
            const uint4 seen = load_row(row + vectors - 1 - v);
            stale += seen.x != round || seen.y != round || seen.z != round || seen.w != round;
        }
        publish(own->counter, peer->go, round);
    }
    if (stale != 0) atomicAdd(&own->stale, stale);
    leave(*own, first + rounds, in_time);
}

// Stores into the other GPU until this one's kernel has ended.
__global__ void disturb(const Board* own, uint4* there, unsigned last) {
    const uint64_t deadline = now_ns() + limit_ns;
    for (unsigned pass = 0;; ++pass) {
        const bool over = threadIdx.x == 0 &&
                          (int(load_acquire(&own->over.value) - last) >= 0 || now_ns() > deadline);
        if (__syncthreads_or(over)) return;
        for (size_t v = blockIdx.x * size_t(blockDim.x) + threadIdx.x; v < noise_vectors;
             v += size_t(gridDim.x) * blockDim.x)
            store_row(there + v, pass);
    }
}

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(2);
}
#define CHECK(call) check(call, #call)

// What lies on one GPU.
struct Side {
    Board* board;
    uint4 *rows, *noise;
    cudaStream_t main, beside;
};

Side open(int gpu) {
    Side side{};
    CHECK(cudaSetDevice(gpu));
    CHECK(cudaDeviceEnablePeerAccess(1 - gpu, 0));
    CHECK(cudaMalloc(&side.board, sizeof(Board)));
    CHECK(cudaMemset(side.board, 0, sizeof(Board)));
    CHECK(cudaMalloc(&side.rows, size_t(ctas) * vectors * sizeof(uint4)));
    CHECK(cudaMemset(side.rows, 0, size_t(ctas) * vectors * sizeof(uint4)));
    CHECK(cudaMalloc(&side.noise, noise_vectors * sizeof(uint4)));
    CHECK(cudaStreamCreateWithFlags(&side.main, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&side.beside, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    return side;
}

Board read(const Side& side) {
    Board board;
    CHECK(cudaMemcpy(&board, side.board, sizeof board, cudaMemcpyDeviceToHost));
    return board;
}

// One run; returns the stale vectors that the consumer saw.
template <Form form>
unsigned long long run(const Side (&side)[2], unsigned first, unsigned rounds) {
    const unsigned long long before = read(side[1]).stale;
    for (int gpu : {0, 1}) {
        CHECK(cudaSetDevice(gpu));
        disturb<<<noise_ctas, noise_threads, 0, side[gpu].beside>>>(
            side[gpu].board, side[1 - gpu].noise, first + rounds);
    }
    CHECK(cudaSetDevice(1));
    consume<<<ctas, threads, 0, side[1].main>>>(side[1].board, side[0].board, side[1].rows, first,
                                                rounds);
    CHECK(cudaSetDevice(0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(begin, side[0].main));
    produce<form><<<ctas, threads, 0, side[0].main>>>(side[0].board, side[1].board, side[1].rows,
                                                      first, rounds);
    CHECK(cudaEventRecord(end, side[0].main));
    for (int gpu : {0, 1}) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaDeviceSynchronize());
        if (read(side[gpu]).late.value != 0) {
            std::fprintf(stderr, "%s: GPU %d gave up; does anything else run there?\n", names[form],
                         gpu);
            std::exit(2);
        }
    }
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    const unsigned long long stale = read(side[1]).stale - before;
    std::printf("%-40s %8u rounds  %6.2f us a round  %6llu stale vectors\n", names[form], rounds,
                ms * 1e3 / rounds, stale);
    std::fflush(stdout);
    return stale;
}

int main(int count, char** words) {
    const int runs = count > 1 ? std::atoi(words[1]) : 8;
    const unsigned rounds = count > 2 ? unsigned(std::atoi(words[2])) : 400'000;
    int gpus = 0, reachable = 0;
    // A kernel that is loaded at its launch waits for those that run, which here wait for it.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    CHECK(cudaGetDeviceCount(&gpus));
    if (gpus < 2 || runs < 1 || rounds < 1) {
        std::fprintf(stderr, "needs two GPUs; usage: tail [RUNS] [ROUNDS]\n");
        return 2;
    }
    CHECK(cudaDeviceCanAccessPeer(&reachable, 0, 1));
    if (!reachable) {
        std::fprintf(stderr, "GPU 0 cannot reach the memory of GPU 1\n");
        return 2;
    }
    const Side side[2] = {open(0), open(1)};
    unsigned first = 0, lost = 0;
    unsigned long long promised = 0;
    for (int i = 0; i < runs; ++i) {
        lost += run<relaxed>(side, first, rounds) != 0;
        promised += run<fenced>(side, first + rounds, rounds);
        promised += run<acq_rel>(side, first + 2 * rounds, rounds);
        first += 3 * rounds;
    }
    const bool noticed = run<flag_first>(side, first, 2000) != 0;
    std::printf("%u of %d runs with a relaxed counter had stale vectors\n", lost, runs);
    return promised == 0 && noticed ? 0 : 1;
}
