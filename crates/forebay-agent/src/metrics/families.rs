//! The table of metrics.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use forebay_tier::status::{CopiesStatus, CopyState, CopyStep, Health, Status, TierStatus};

use super::{Counts, Family, From, Kind, Samples};
use crate::job::Job;

const fn job(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
    read: fn(&Status, &Job, &mut Samples<'_>),
) -> Family {
    Family { name, kind, labels, help, from: From::Job(read) }
}

const fn agent(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
    read: fn(&Counts, &mut Samples<'_>),
) -> Family {
    Family { name, kind, labels, help, from: From::Agent(read) }
}

/// For each tier a number, where it has one.
fn tiers(status: &Status, to: &mut Samples<'_>, of: fn(&TierStatus) -> Option<f64>) {
    for tier in &status.tiers {
        if let Some(value) = of(tier) {
            to.add(&[&tier.name], value);
        }
    }
}

fn health(status: &Status, _: &Job, to: &mut Samples<'_>) {
    const ALL: [(Health, &str); 6] = [
        (Health::Unknown, "unknown"),
        (Health::Ok, "ok"),
        (Health::Troubled, "troubled"),
        (Health::Full, "full"),
        (Health::ReadOnly, "read_only"),
        (Health::Down, "down"),
    ];
    for tier in &status.tiers {
        for (health, name) in ALL {
            to.add(&[&tier.name, name], f64::from(u8::from(tier.health == health)));
        }
    }
}

fn limits(status: &Status, _: &Job, to: &mut Samples<'_>) {
    for tier in &status.tiers {
        for (direction, cap) in [("read", tier.read_cap), ("write", tier.write_cap)] {
            if let Some(cap) = cap {
                to.add(&[&tier.name, direction], cap as f64);
            }
        }
    }
}

/// The number and the age of the newest step that each tier has committed.
fn newest(status: &Status, to: &mut Samples<'_>, of: fn(u64, f64) -> f64) {
    for (number, tier) in status.tiers.iter().enumerate() {
        let newest = status.steps.iter().rev();
        use CopyState::{Committed, Copied, OnNodes};
        let has = |copy: &CopyState| matches!(copy, Committed | OnNodes | Copied);
        let newest = newest.filter(|step| step.copies.get(number).is_some_and(has));
        if let Some(step) = newest.into_iter().next() {
            to.add(&[&tier.name], of(step.step, step.age_seconds));
        }
    }
}

fn transfers(status: &Status, _: &Job, to: &mut Samples<'_>) {
    let mut by_priority = BTreeMap::from([("restore", 0), ("newest", 0), ("archive", 0)]);
    for transfer in &status.transfers {
        if let Some(count) = by_priority.get_mut(transfer.priority.as_str()) {
            *count += 1;
        }
    }
    for (priority, count) in by_priority {
        to.add(&[priority], f64::from(count));
    }
}

fn left(status: &Status, _: &Job, to: &mut Samples<'_>) {
    let left = |t: &forebay_tier::status::Transfer| t.total_bytes.saturating_sub(t.done_bytes);
    to.add(&[], status.transfers.iter().map(|transfer| left(transfer) as f64).sum());
}

/// A number of copies on other nodes, where there are to be any.
fn copies(status: &Status, to: &mut Samples<'_>, of: fn(&CopiesStatus) -> u64) {
    if let Some(copies) = &status.copies {
        to.add(&[], of(copies) as f64);
    }
}

use Kind::{Counter, Gauge};

/// Every metric.
pub(crate) const FAMILIES: &[Family] = &[
    job("forebay_up_seconds", Gauge, &[], "Seconds since the job's mover started", |s, _, to| {
        to.add(&[], s.up_seconds)
    }),
    job(
        "forebay_tier_health",
        Gauge,
        &["tier", "health"],
        "1 for the health that the tier has, else 0",
        health,
    ),
    job(
        "forebay_tier_used_bytes",
        Gauge,
        &["tier"],
        "Bytes of checkpoints in the tier",
        |s, _, to| tiers(s, to, |tier| Some(tier.used_bytes as f64)),
    ),
    job(
        "forebay_tier_capacity_bytes",
        Gauge,
        &["tier"],
        "Most bytes of checkpoints, where there is a limit",
        |s, _, to| tiers(s, to, |tier| tier.capacity_bytes.map(|bytes| bytes as f64)),
    ),
    job(
        "forebay_tier_free_bytes",
        Gauge,
        &["tier"],
        "Bytes free in the tier's file system",
        |s, _, to| tiers(s, to, |tier| tier.free_bytes.map(|bytes| bytes as f64)),
    ),
    job(
        "forebay_tier_committed_steps",
        Gauge,
        &["tier"],
        "Steps committed in the tier",
        |s, _, to| tiers(s, to, |tier| Some(tier.committed as f64)),
    ),
    job(
        "forebay_tier_read_bytes_total",
        Counter,
        &["tier"],
        "Bytes read from the tier",
        |s, _, to| tiers(s, to, |tier| Some(tier.read_bytes as f64)),
    ),
    job(
        "forebay_tier_written_bytes_total",
        Counter,
        &["tier"],
        "Bytes written to the tier",
        |s, _, to| tiers(s, to, |tier| Some(tier.written_bytes as f64)),
    ),
    job(
        "forebay_tier_limit_bytes_per_second",
        Gauge,
        &["tier", "direction"],
        "Bandwidth cap, where there is one",
        limits,
    ),
    job(
        "forebay_tier_paused",
        Gauge,
        &["tier"],
        "1 while somebody has paused the tier, else 0",
        |s, _, to| tiers(s, to, |tier| Some(f64::from(u8::from(tier.paused)))),
    ),
    job(
        "forebay_tier_newest_step",
        Gauge,
        &["tier"],
        "Number of the newest step committed in the tier",
        |s, _, to| newest(s, to, |step, _| step as f64),
    ),
    job(
        "forebay_tier_newest_step_age_seconds",
        Gauge,
        &["tier"],
        "Seconds since the newest step in the tier was committed",
        |s, _, to| newest(s, to, |_, age| age),
    ),
    job("forebay_steps", Gauge, &[], "Steps that any tier has", |s, _, to| {
        to.add(&[], s.steps.len() as f64)
    }),
    job("forebay_steps_held", Gauge, &[], "Steps that must not be removed anywhere", |s, _, to| {
        to.add(&[], s.steps.iter().filter(|step| step.held).count() as f64)
    }),
    job("forebay_steps_pinned", Gauge, &[], "Steps that have a name", |s, _, to| {
        to.add(&[], s.steps.iter().filter(|step| !step.pins.is_empty()).count() as f64)
    }),
    job("forebay_steps_waiting", Gauge, &[], "Steps that wait to be moved", |s, _, to| {
        to.add(&[], s.waiting as f64)
    }),
    job("forebay_transfers", Gauge, &["priority"], "Transfers under way", transfers),
    job(
        "forebay_transfer_left_bytes",
        Gauge,
        &[],
        "Bytes that the transfers under way have left",
        left,
    ),
    job(
        "forebay_copies_wanted",
        Gauge,
        &[],
        "Copies that each file of this node's drive is to have on others",
        |s, _, to| copies(s, to, |copies| copies.wanted),
    ),
    job(
        "forebay_copies_missing_steps",
        Gauge,
        &[],
        "Steps in no one place yet that have fewer copies than they are to have",
        |s, _, to| {
            copies(s, to, |copies| {
                let lacks = |step: &&CopyStep| (step.on.len() as u64) < copies.wanted;
                copies.steps.iter().filter(lacks).count() as u64
            });
        },
    ),
    job(
        "forebay_copies_held_bytes",
        Gauge,
        &[],
        "Bytes of other nodes' files on this node's drive",
        |s, _, to| copies(s, to, |copies| copies.held_bytes),
    ),
    job(
        "forebay_copies_sent_bytes_total",
        Counter,
        &[],
        "Bytes of copies sent to other nodes",
        |s, _, to| copies(s, to, |copies| copies.sent_bytes),
    ),
    job(
        "forebay_copies_received_bytes_total",
        Counter,
        &[],
        "Bytes of copies taken from other nodes",
        |s, _, to| copies(s, to, |copies| copies.received_bytes),
    ),
    job(
        "forebay_copies_failures_total",
        Counter,
        &[],
        "Tries to copy to another node that failed",
        |s, _, to| copies(s, to, |copies| copies.failures),
    ),
    job(
        "forebay_errors_total",
        Counter,
        &["code"],
        "Errors, by their code in docs/ERRORS.md",
        |s, job, to| {
            for (code, count) in job.errors(s) {
                to.add(&[&code], count as f64);
            }
        },
    ),
    agent("forebay_agent_info", Gauge, &["version"], "1; the version is the label", |_, to| {
        to.add(&[env!("CARGO_PKG_VERSION")], 1.0)
    }),
    agent("forebay_agent_http_connections", Gauge, &[], "Open HTTP connections", |c, to| {
        to.add(&[], c.http_connections.load(Ordering::Relaxed) as f64)
    }),
    agent(
        "forebay_agent_http_answers_total",
        Counter,
        &["route", "status"],
        "Answers by HTTP",
        |c, to| {
            for (route, status, count) in c.answers() {
                to.add(&[route, &status.to_string()], count as f64);
            }
        },
    ),
    agent(
        "forebay_agent_socket_clients",
        Gauge,
        &[],
        "Local processes that are connected",
        |c, to| to.add(&[], c.socket_clients.load(Ordering::Relaxed) as f64),
    ),
    agent(
        "forebay_agent_socket_requests_total",
        Counter,
        &["request"],
        "Requests on the socket",
        |c, to| {
            for (request, count) in c.requests() {
                to.add(&[request], count as f64);
            }
        },
    ),
    agent(
        "forebay_agent_actions_total",
        Counter,
        &["action", "result"],
        "Actions asked for; the result is done or refused",
        |c, to| {
            for (action, done, count) in c.actions() {
                to.add(&[action, if done { "done" } else { "refused" }], count as f64);
            }
        },
    ),
    agent(
        "forebay_agent_staged_saves",
        Gauge,
        &[],
        "Staged saves that are kept, or finished, for their processes",
        |c, to| to.add(&[], c.staged_saves.load(Ordering::Relaxed) as f64),
    ),
    agent("forebay_agent_staged_bytes", Gauge, &[], "Bytes of memory that they take", |c, to| {
        to.add(&[], c.staged_bytes.load(Ordering::Relaxed) as f64)
    }),
    agent(
        "forebay_agent_staged_finished_total",
        Counter,
        &["result"],
        "Saves of processes that died: committed, failed, or not_needed (ranks had done it)",
        |c, to| {
            for (result, count) in c.all_finished() {
                to.add(&[result], count as f64);
            }
        },
    ),
    agent(
        "forebay_agent_denied_total",
        Counter,
        &[],
        "Wrong tokens, users that may not, connections too many",
        |c, to| to.add(&[], c.denied.load(Ordering::Relaxed) as f64),
    ),
    agent(
        "forebay_agent_spans_lost_total",
        Counter,
        &[],
        "Spans of traces that could not be sent",
        |c, to| to.add(&[], c.spans_lost.load(Ordering::Relaxed) as f64),
    ),
];
