// SPDX-License-Identifier: Apache-2.0
// Hopper's tensor cores and its copy engine's boxes on a CPU, for cluster.hpp: operands are found
// by their descriptors, and read when the product is waited for.
#pragma once

namespace emulated {

// As tests/gemm/emulate.py encodes it.
struct Map {
    unsigned long long address, rank, sizes[5], strides[4], box[5];
};

// A box lands in every CTA of `ctas` by itself; what lies outside of the tensor is zero.
inline void load_box(unsigned ctas, void* to, const Map& map, std::vector<long long> from,
                     const void* barrier) {
    Core& own = machine->mine();
    machine->check(map.rank == from.size(), unknown);
    const bool followed = own.followed[cta->current];
    machine->check(own.fenced[cta->current] || !followed, unordered);
    for (const Late& l : machine->late)
        machine->check(followed || !l.holds(reinterpret_cast<const void*>(map.address)), hasty);
    machine->check(address(to) % 1024 == 0, misaligned);
    std::vector<Byte> data;
    std::vector<unsigned long long> at(map.rank, 0);
    for (bool more = true; more;) {
        const char* place = reinterpret_cast<const char*>(map.address) + from[0];
        bool inside = from[0] >= 0 && from[0] < (long long)map.sizes[0];
        for (unsigned d = 1; d < map.rank; ++d) {
            const long long x = from[d] + (long long)at[d];
            inside = inside && x >= 0 && x < (long long)map.sizes[d];
            place += x * (long long)map.strides[d - 1];
        }
        data.resize(data.size() + map.box[0]);
        if (inside)
            std::memcpy(data.data() + data.size() - map.box[0], place,
                        std::min(map.box[0], map.sizes[0] - (unsigned long long)from[0]));
        more = false;
        for (unsigned d = 1; d < map.rank && !more; ++d) {
            more = ++at[d] < map.box[d];
            if (!more) at[d] = 0;
        }
    }
    for (unsigned rank = 0; rank < 2; ++rank)
        if (ctas >> rank & 1)
            machine->send({rank, address(to), data, true, false, address(barrier)});
}

// Bytes that follow each other, into this CTA.
inline void load_bytes(void* to, const void* from, unsigned bytes, const void* barrier) {
    const auto whole = [](unsigned long long x) { return x % 16 == 0; };
    const bool good = whole(address(to)) && whole(bytes) && whole(std::size_t(from));
    machine->check(good, misaligned);
    const Byte* const first = static_cast<const Byte*>(from);
    machine->send({cta->rank, address(to), {first, first + bytes}, false, false, address(barrier)});
}

// What operands are: weft::Operand, which is not known here yet.
enum Kind : unsigned { fp8, bf16, fp16 };

// The numbers of 32 bytes of one row of a tile; returns how many there are.
inline unsigned read_row(unsigned kind, unsigned long long tile, unsigned row, float (&to)[32]) {
    static const std::vector<float> numbers = [] {
        std::vector<float> all;
        for (unsigned i = 0; i < 256; ++i) all.push_back(from_e4m3(i));
        return all;
    }();
    const unsigned start = unsigned(tile & 0x3fff) * 16,
                   blocks = unsigned(tile >> 32 & 0x3fff) * 16;
    const unsigned at = start + row / 8 * blocks + row % 8 * 128;
    const unsigned size = kind == fp8 ? 1 : 2;
    for (unsigned k = 0; k < 32; k += 16) {
        const unsigned there = (at + k) ^ (at + k >> 7 & 7) << 4;
        const Byte* from = machine->at(cta->rank, there);
        for (unsigned i = 0; i < 16 / size; ++i) {
            float& number = to[k / size + i];
            if (kind == fp8) {
                number = numbers[from[i]];
            } else if (kind == bf16) {
                number =
                    __uint_as_float(unsigned(from[2 * i]) << 16 | unsigned(from[2 * i + 1]) << 24);
            } else {
                _Float16 half;
                std::memcpy(&half, from + 2 * i, sizeof half);
                number = float(half);
            }
        }
    }
    return 32 / size;
}

constexpr unsigned long long in_registers = ~0ull;  // where a descriptor of A would be

// One wgmma; its sums are whatever they are until somebody waits, when A's registers are read.
inline void multiply(unsigned kind, float* sum, unsigned columns, unsigned long long a,
                     unsigned long long b, bool add, const unsigned* registers = nullptr) {
    Core& own = machine->mine();
    const unsigned thread = cta->current, group = thread / 128, n = own.issued[thread]++;
    machine->check(own.ordered[thread], unordered);
    machine->check(a == in_registers || a >> 49 == 1ull << 13, unknown);
    machine->check(b >> 49 == 1ull << 13, unknown);
    const Operation operation{sum, a, b, columns, add, 0, kind, registers};
    if (n == own.issues[group].size()) own.issues[group].push_back(operation);
    const Operation& other = own.issues[group][n];
    machine->check(other.a == a && other.b == b && other.columns == columns && other.add == add,
                   unlike);
    if (!add)
        for (unsigned i = 0; i < columns / 2; ++i) sum[i] = __uint_as_float(0x7fc00000);
    own.operations[thread].push_back(operation);
}

// Row lane / 4, or the one eight further on, of an A in registers, which four lanes have: of the
// product at a place among those that are open.
inline void read_registers(std::size_t place, unsigned eight, float (&to)[32]) {
    const Core& own = machine->mine();
    for (unsigned k = 0; k < 32; ++k) {
        const unsigned lane = cta->current / 4 * 4 + k % 16 / 4;
        const unsigned word = own.operations[lane][place].registers[k / 16 * 2 + eight];
        to[k] = from_e4m3(word >> k % 4 * 8 & 0xff);
    }
}

// This thread's sums of one product: two rows of it, and two columns of each eight.
inline void compute(const Operation& operation, std::size_t at) {
    const unsigned lane = cta->current % 32, first = cta->current / 32 % 4 * 16 + lane / 4;
    float a[2][32], b[32];
    for (unsigned i = 0; i < 2; ++i)
        if (operation.a == in_registers)
            read_registers(at, i, a[i]);
        else
            read_row(operation.kind, operation.a, first + 8 * i, a[i]);
    for (unsigned c = 0; c < operation.columns / 4; ++c) {
        const unsigned numbers =
            read_row(operation.kind, operation.b, c / 2 * 8 + lane % 4 * 2 + c % 2, b);
        for (unsigned i = 0; i < 2; ++i) {
            float& sum = operation.sum[c / 2 * 4 + i * 2 + c % 2];
            float total = operation.add ? sum : 0.0f;
            for (unsigned k = 0; k < numbers; ++k) total += a[i][k] * b[k];
            sum = total;
        }
    }
}

inline void commit() {
    Core& own = machine->mine();
    const unsigned group = ++own.groups[cta->current];
    for (Operation& operation : own.operations[cta->current])
        if (operation.group == 0) operation.group = group;
}
// All that were committed, but for the last so many groups; a warp waits as one.
inline void settle_groups(unsigned but) {
    Core& own = machine->mine();
    std::vector<Operation>& open = own.operations[cta->current];
    meet_warp();
    std::vector<Operation> left;
    for (const Operation& operation : open)
        if (operation.group != 0 && operation.group + but <= own.groups[cta->current])
            compute(operation, std::size_t(&operation - open.data()));
        else
            left.push_back(operation);
    own.ordered[cta->current] = false;
    meet_warp();
    open = std::move(left);
}

// To global memory; an address out of shared memory that nobody has written is odd.
inline void store_vector(uint4* to, uint4 vector) {
    const bool whole = reinterpret_cast<std::size_t>(to) % 16 == 0;
    machine->check(whole, misaligned);
    machine->check(machine->mine().followed[cta->current], hasty);
    if (whole) *to = vector;
}

// prmt: a choice of 8 and more would be the sign of a byte, which nothing asks for here.
inline unsigned permute_bytes(unsigned low, unsigned high, unsigned choice) {
    machine->check((choice & 0x8888) == 0, unknown);
    const unsigned long long all = (unsigned long long)high << 32 | low;
    unsigned bytes = 0;
    for (unsigned i = 0; i < 4; ++i)
        bytes |= unsigned(all >> 8 * (choice >> 4 * i & 7) & 0xff) << 8 * i;
    return bytes;
}

// stmatrix: each lane gives the address of a row, and holds two neighbours of each block.
inline void store_matrices(void* at, bool transposed, const unsigned (&halves)[4]) {
    void* row[32];
    machine->check(address(at) % 16 == 0, misaligned);
    survey(at, [&](unsigned lane, void* theirs) { row[lane] = theirs; });
    const unsigned lane = cta->current % 32;
    for (unsigned i = 0; i < 4; ++i)
        for (unsigned t = 0; t < 2; ++t) {
            const unsigned r = lane / 4, c = lane % 4 * 2 + t;
            const unsigned short half = (unsigned short)(halves[i] >> 16 * t);
            char* to = static_cast<char*>(row[8 * i + (transposed ? c : r)]);
            std::memcpy(to + 2 * (transposed ? r : c), &half, sizeof half);
        }
}

}  // namespace emulated
