// The numbers that Python compares its mirrors with (runtime/layout.py): for every struct of the
// header that Python reads or writes, its size and then every field in the mirror's order.
#pragma once
#include <weft/device/header.cuh>

#define WEFT_AT(T, field) WEFT_OFFSET(weft::T, field)
#define WEFT_ERROR_RECORD                                                                          \
    sizeof(weft::ErrorRecord), WEFT_AT(ErrorRecord, code), WEFT_AT(ErrorRecord, rank),             \
        WEFT_AT(ErrorRecord, peer), WEFT_AT(ErrorRecord, phase), WEFT_AT(ErrorRecord, wanted),     \
        WEFT_AT(ErrorRecord, seen), WEFT_AT(ErrorRecord, elapsed_ns), WEFT_AT(ErrorRecord, token), \
        WEFT_AT(ErrorRecord, slot), WEFT_AT(ErrorRecord, reported_by),                             \
        WEFT_AT(ErrorRecord, reserved)
#define WEFT_MAILBOX                                                                \
    sizeof(weft::Mailbox), WEFT_AT(Mailbox, host_word), WEFT_AT(Mailbox, refusals), \
        WEFT_AT(Mailbox, broken_code), WEFT_AT(Mailbox, broken), WEFT_AT(Mailbox, refused)
#define WEFT_RECORD                                                          \
    sizeof(weft::Record), WEFT_AT(Record, epoch), WEFT_AT(Record, start_ns), \
        WEFT_AT(Record, end_ns), WEFT_AT(Record, phase), WEFT_AT(Record, tokens)
#define WEFT_TIMELINE                                                                           \
    sizeof(weft::Timeline), WEFT_AT(Timeline, epoch), WEFT_AT(Timeline, start_ns),              \
        WEFT_AT(Timeline, sent_ns), WEFT_AT(Timeline, published_ns), WEFT_AT(Timeline, end_ns), \
        WEFT_AT(Timeline, phase), WEFT_AT(Timeline, ctas), WEFT_AT(Timeline, arrived_ns)
#define WEFT_FAULT                                                                            \
    sizeof(weft::Fault), WEFT_AT(Fault, point), WEFT_AT(Fault, action), WEFT_AT(Fault, peer), \
        WEFT_AT(Fault, reserved), WEFT_AT(Fault, epoch), WEFT_AT(Fault, argument)
#define WEFT_HEADER                                                                               \
    sizeof(weft::Header), WEFT_AT(Header, abi), WEFT_AT(Header, rank), WEFT_AT(Header, ranks),    \
        WEFT_AT(Header, generation), WEFT_AT(Header, share_bytes), WEFT_AT(Header, first_epoch),  \
        WEFT_AT(Header, deadline_ns), WEFT_AT(Header, first_deadline_ns),                         \
        WEFT_AT(Header, state.epoch), WEFT_AT(Header, state.failed), WEFT_AT(Header, state.rows), \
        WEFT_AT(Header, source_rows), WEFT_AT(Header, arrived), WEFT_AT(Header, refusing),        \
        WEFT_AT(Header, refusals), WEFT_AT(Header, sending), WEFT_AT(Header, notices),            \
        WEFT_AT(Header, waiting_ns), WEFT_AT(Header, last_words), WEFT_AT(Header, fault),         \
        WEFT_AT(Header, ring), WEFT_AT(Header, timelines)
#define WEFT_SITE                                                                           \
    sizeof(weft::Site), WEFT_AT(Site, base), WEFT_AT(Site, stride), WEFT_AT(Site, mailbox), \
        WEFT_AT(Site, rank), WEFT_AT(Site, descriptor)
// What every entry exports first: COMMON in runtime/layout.py.
#define WEFT_COMMON                                                                     \
    weft::abi, WEFT_ERROR_RECORD, WEFT_MAILBOX, WEFT_RECORD, WEFT_TIMELINE, WEFT_FAULT, \
        WEFT_HEADER, WEFT_SITE
