//! One step on its way, in a thread of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};

use super::io_priority;
use super::retry::Retry;
use super::state::{Moving, Shared, Watch};
use crate::audit_log::Event;
use crate::hop::{Arrival, HopOptions, HopReport, hop};
use crate::policy::Order;

/// A step of which another commit is there that must stay is left alone for that long: a person has to look.
const OTHER_COMMIT: Duration = Duration::from_secs(600);

/// Moves a step, and tells how that went.
pub(crate) fn run(shared: &Shared, moving: &Arc<Moving>) {
    io_priority::set(shared.tiers.config.moving.io_priority);
    let order = moving.order;
    let moved = traced(shared, &order, || try_hop(shared, moving));
    if let Ok(report) = &moved
        && let Arrival::Committed { by_us: true, durable } = report.arrival
    {
        log(shared, &order, report, durable);
    }
    // Stores are asked for their names before the lock is taken: one that hangs must hold nobody else up.
    let at = moved.as_ref().err().map(|error| at_fault(shared, &order, error));
    shared.change(|state| {
        state.moving.retain(|other| !Arc::ptr_eq(other, moving));
        for tier in [order.from, order.to] {
            if let Some(tier) = state.tiers.get_mut(tier) {
                tier.look_again([order.step]);
            }
        }
        match moved {
            Ok(HopReport { arrival: Arrival::Waiting { .. }, .. }) => {
                // Other nodes bring the rest: whether they have is asked again soon.
                let retry = state.retries.entry((order.step, order.to)).or_default();
                *retry = Retry::default();
                retry.rest(Instant::now(), shared.tiers.config.moving.look_every);
            }
            Ok(_) => {
                state.retries.remove(&(order.step, order.to));
                if let Some(tier) = state.tiers.get_mut(order.to) {
                    tier.unblock();
                }
            }
            Err(error) if error.code() == Code::Cancelled => {}
            Err(error) => failed(shared, state, &order, &error, at.unwrap_or(order.to)),
        }
    });
}

/// A span for whoever collects traces, and a line in the log.
fn traced(
    shared: &Shared,
    order: &Order,
    hop: impl FnOnce() -> Result<HopReport>,
) -> Result<HopReport> {
    let (job, step) = (shared.tiers.job.as_deref(), order.step);
    let span = tracing::info_span!("hop", job, step, from = order.from, to = order.to);
    let _entered = span.enter();
    let moved = hop();
    match &moved {
        // It was there already.
        Ok(HopReport { bytes_sent: 0, .. }) => tracing::debug!(bytes_sent = 0, "moved"),
        Ok(report) => tracing::info!(bytes_sent = report.bytes_sent, "moved"),
        Err(error) if error.code() == Code::Cancelled => tracing::info!("stopped"),
        Err(error) => tracing::warn!(%error, "not moved"),
    }
    moved
}

fn try_hop(shared: &Shared, moving: &Moving) -> Result<HopReport> {
    let (order, config) = (moving.order, &shared.tiers.config.moving);
    let (from, to) = (shared.tiers.side(order.from)?, shared.tiers.side(order.to)?);
    let options = HopOptions {
        part_bytes: config.part_bytes,
        files_at_once: config.files_at_once,
        priority: order.priority,
        replaces: order.replaces,
        who: shared.tiers.who.clone(),
        ..HopOptions::default()
    };
    hop(&from, &to, order.step, &options, &Watch { moving, stop: &shared.stop })
}

fn log(shared: &Shared, order: &Order, report: &HopReport, durable: bool) {
    let tier = |number| shared.tiers.tier(number).ok();
    let place = |number| tier(number).map(|tier| tier.config.place.clone());
    let root = shared.tiers.existing(order.to).ok();
    let note = format!("{} bytes sent", report.bytes_sent);
    let note = if durable { note } else { note + "; may not survive a loss of power" };
    let note = match order.replaces {
        Some(older) => format!("{note}; replaces {older}"),
        None => note,
    };
    shared.log(Event {
        who: shared.tiers.who.clone(),
        what: "move".to_owned(),
        origin: "rules".to_owned(),
        step: Some(order.step),
        attempt: Some(report.attempt.to_string()),
        from: place(order.from),
        to: place(order.to),
        checksum: root.and_then(|root| shared.checksum_of(&root, order.step)),
        note: Some(note),
    });
}

/// Which tier is at fault decides what is left alone for a while: all writes to it, or this step.
fn failed(
    shared: &Shared,
    state: &mut super::state::State,
    order: &Order,
    error: &Error,
    at: usize,
) {
    let seed = order.step ^ shared.started.elapsed().as_nanos() as u64;
    let retry = state.retries.entry((order.step, order.to)).or_default();
    let mut again = retry.fail(Instant::now(), seed);
    if matches!(error.code(), Code::LostCommit | Code::AlreadyExists) {
        retry.rest(Instant::now(), OTHER_COMMIT);
        again = OTHER_COMMIT;
    }
    if at == order.to
        && is_of_store(error)
        && let Some(tier) = state.tiers.get_mut(order.to)
    {
        again = again.max(tier.block(error, seed));
    }
    state.trouble(Some(at), Some(order.step), error, Some(again));
}

/// Whether the store is to blame, not this step.
fn is_of_store(error: &Error) -> bool {
    matches!(
        error.code(),
        Code::NoSpace
            | Code::PermissionDenied
            | Code::Io
            | Code::Timeout
            | Code::NotDurable
            | Code::Unsupported
    )
}

/// The tier whose place the error names; the destination where none is named.
fn at_fault(shared: &Shared, order: &Order, error: &Error) -> usize {
    let name = |tier| shared.tiers.existing(tier).map(|root| root.store.name()).unwrap_or_default();
    let place = error.place().unwrap_or_default();
    let names = |tier| {
        let name = name(tier);
        !name.is_empty() && place.strip_prefix(&name).is_some_and(|rest| rest.starts_with('/'))
    };
    if names(order.from) && !names(order.to) { order.from } else { order.to }
}
