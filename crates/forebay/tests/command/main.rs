//! The `forebay` command, run as users run it. One binary, so that it links once.
//!
//! | module | what is tested |
//! | --- | --- |
//! | `battery` | every file and folder of the safetensors battery, inspected and loaded |
//! | `select` | names, shards and regions arrive as slices of the bytes |
//! | `output` | JSON, escapes, exit codes, environment, closed pipes |
//! | `trouble` | refusals of the kernel, strangers' files, files that change, signals |
//! | `bench` | the benchmark makes, measures and cleans up |
//! | `checkpoints` | checkpoints of torch and files of torch.save |
//! | `ckpt` | steps of a root listed, shown, pruned, collected |
//! | `ckpt_bucket` | the same on URLs of buckets |
//! | `ckpt_verify` | damage of every kind, found and named |
//! | `ckpt_export` | exports and comparisons |
//! | `tier` | tiers drained, seen, told what stays; the configuration; the audit log |
//! | `agent` | the agent, over HTTP, its socket and in a browser |
//! | `gpu` | loads to a GPU that the simulated driver plays |

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a test that cannot go on must fail, and one that is skipped must say so"
)]

mod agent;
mod battery;
mod bench;
mod checkpoints;
mod ckpt;
mod ckpt_bucket;
mod ckpt_export;
mod ckpt_gc;
mod ckpt_make;
mod ckpt_verify;
mod gpu;
#[path = "../../../forebay-simgpu/harness.rs"]
mod harness;
mod output;
mod select;
#[path = "../../../forebay-store/tests/servers/mod.rs"]
mod servers;
mod tier;
mod trouble;
mod util;
