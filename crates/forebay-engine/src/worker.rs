//! The threads of a load.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use forebay_device::Device;
use forebay_error::{Error, Result};
use forebay_topology::{Root, numa};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::options::PathChoice;
use crate::pace;
use crate::paths::{copy, direct};
use crate::pump::{self, PumpTask};
use crate::route::{Cold, may_give_up};
use crate::shared::{Shared, internal};

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Pump(PumpTask),
    Copy,
    Direct,
    /// Makes the checksum kernel ready.
    Kernel,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Pump(_) => "forebay-pump",
            Role::Copy => "forebay-copy",
            Role::Direct => "forebay-direct",
            Role::Kernel => "forebay-kernel",
        }
    }
}

/// Direct workers of a host load: each copies from staging memory to the targets itself, at 5 to 10 GB/s.
const HOST_DIRECT_WORKERS_MAX: usize = 4;

/// Starts the workers: `threads` readers, of which the pump counts as one where it does DMA (elsewhere it sleeps most
/// of the time); and beside them the direct workers, which sleep as long as nothing is cold.
pub(crate) fn spawn_all(shared: &Arc<Shared>, threads: usize, window_limit: u64) -> Result<()> {
    if shared.plan.pieces().is_empty() {
        return Ok(());
    }
    let gpu = shared.engine.device().is_gpu();
    let pieces = shared.plan.pieces().len();
    let mut roles = Vec::new();
    let mut readers = threads;
    if gpu {
        let task = pump_task(shared, threads, window_limit);
        readers = pace::readers_without_dma(threads).min(pieces) - task.spare_readers;
        roles.push(Role::Pump(task));
    }
    roles.extend(std::iter::repeat_n(Role::Copy, readers.min(pieces)));
    if shared.routes.iter().any(|route| route.cold() == Cold::Ring) {
        let direct = if gpu { 1 } else { threads.min(HOST_DIRECT_WORKERS_MAX) };
        roles.extend(std::iter::repeat_n(Role::Direct, direct.min(pieces)));
    }
    if shared.routes.iter().any(|route| route.cold() == Cold::Threads) {
        shared.queue.serve_cold_by_threads();
    }
    if shared.checks.is_loading() {
        roles.push(Role::Kernel);
    }
    tracing::debug!(?roles, "workers");
    start_all(shared, &roles)
}

/// What the pump is to do: DMA, if there is an object for it, beside fewer readers than there may be.
fn pump_task(shared: &Shared, threads: usize, window_limit: u64) -> PumpTask {
    let dma = shared.routes.iter().any(|route| route.dma);
    let mut spare_readers = 0;
    if dma {
        shared.queue.dma_begins(threads == 1 || shared.options.path == PathChoice::Dma);
        // One at the least: it reads what DMA leaves, and sleeps otherwise.
        let most = shared.engine.config().tuning.readers_beside_dma;
        let beside = (threads - 1).min(most).max(1);
        let all = pace::readers_without_dma(threads).min(shared.plan.pieces().len());
        spare_readers = all.saturating_sub(beside);
    }
    let may_give_up = may_give_up(&shared.options, threads);
    PumpTask { dma, window_limit, may_give_up, spare_readers }
}

/// Starts the readers for which DMA had left no room, now that it has ended; as many as the system lets.
pub(crate) fn add_readers(shared: &Arc<Shared>, count: usize) {
    for missing in (1..=count).rev() {
        if let Err(error) = spawn(shared, Role::Copy) {
            tracing::warn!(missing, error = error.render(), "going on with fewer threads");
            return;
        }
    }
}

/// Starts as many as the system lets: the pump, and one reader, are enough.
fn start_all(shared: &Arc<Shared>, roles: &[Role]) -> Result<()> {
    let mut readers = 0;
    for &role in roles {
        match spawn(shared, role) {
            Ok(()) => readers += usize::from(role == Role::Copy),
            Err(error) if readers > 0 => {
                let (name, missing) = (role.name(), error.render());
                tracing::warn!(name, missing, "going on with fewer threads");
                let text = format!("threads: only {readers} readers could be started");
                shared.tally.refusal(&text);
                match (role, shared.engine.device()) {
                    (Role::Direct, _) => direct::without_worker(shared),
                    (Role::Kernel, Device::Cuda(gpu)) => {
                        shared.checks.end(gpu, &error, &shared.tally);
                    }
                    _ => {}
                }
            }
            Err(error) => {
                shared.fail(internal("not all workers started"));
                return Err(error);
            }
        }
    }
    Ok(())
}

fn spawn(shared: &Arc<Shared>, role: Role) -> Result<()> {
    shared.worker_started();
    let own = shared.clone();
    let spawned = std::thread::Builder::new().name(role.name().to_owned()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(|| run(&own, role)));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => own.fail(error),
            Err(_) => own.fail(internal("a worker thread panicked")),
        }
        own.worker_ended();
    });
    if let Err(error) = spawned {
        shared.worker_ended();
        return Err(Error::io("cannot start a worker thread", error)
            .hint("lower `--threads`, or raise the limit on processes"));
    }
    Ok(())
}

fn run(shared: &Arc<Shared>, role: Role) -> Result<()> {
    if let Device::Cuda(gpu) = shared.engine.device() {
        gpu.bind_thread()?;
        if let Some(node) = gpu.numa_node() {
            stay_on_node(node);
        }
    }
    let result = match role {
        Role::Pump(task) => pump::run(shared, task),
        Role::Copy => copy::run(shared),
        Role::Direct => direct::run(shared),
        Role::Kernel => {
            if let Device::Cuda(gpu) = shared.engine.device() {
                shared.checks.load(gpu, &shared.tally);
            }
            Ok(())
        }
    };
    shared.tally.settle_cpu();
    result
}

/// Keeps this thread on the processors of a NUMA node, within what it is allowed anyway.
fn stay_on_node(node: u32) {
    let root = Root::live();
    if numa::nodes(&root).len() < 2 {
        return;
    }
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return };
    let mut wanted = CpuSet::new();
    let mut any = false;
    for cpu in numa::cpus_of_node(&root, node) {
        if cpu < CpuSet::MAX_CPU && allowed.is_set(cpu) {
            wanted.set(cpu);
            any = true;
        }
    }
    if any && let Err(error) = sched_setaffinity(None, &wanted) {
        tracing::debug!(%error, node, "worker not bound to the GPU's node");
    }
}
