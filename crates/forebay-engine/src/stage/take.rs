//! From slots to the consumer.

use forebay_error::Result;

use super::fill;
use super::job::{Filled, Job};
use crate::shared::internal;

/// How much the priority of these threads is below that of the process, for training goes before them. On a machine
/// with two GPUs, 32 CPUs and eight such threads a rank the slowest hundredth of steps took 40 % longer than without
/// saves at the same priority, and 5 % at this one.
const NICE: i32 = 10;

/// Takes pieces until the job is over.
pub(super) fn run(job: &Job) -> Result<()> {
    // On Linux it is the thread's, not the process'. Where it is refused the save is as good.
    let _ = rustix::process::nice(NICE);
    while let Some(filled) = job.next_filled() {
        let Filled { piece: number, len, slot, landed } = filled;
        if let Some(landed) = &landed
            && let Err(error) = landed.wait()
        {
            // The GPU may still write to it.
            std::mem::forget(slot);
            return Err(error);
        }
        match &slot {
            Some(slot) => job.consumer.take(number, slot.bytes(len))?,
            None => {
                let Some(piece) = job.pieces.get(number) else {
                    return Err(internal("no such piece"));
                };
                fill::with_bytes(job, piece, |bytes| job.consumer.take(number, bytes))?;
                job.count_staged(1);
            }
        }
        drop(slot);
        job.count_taken(len as u64);
    }
    Ok(())
}
