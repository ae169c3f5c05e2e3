//! Who compares blocks with their checksums, and what is said of one that differs.
//!
//! A block that arrives in the memory of a GPU as a whole is checked there, after its copy, by a kernel that reads it
//! at the rate of that memory (`pump/checks`): no CPU has to look at it, so it may come by DMA. All other blocks (in
//! part, with strides, shared out among targets; and every block on the host) are checked by the CPU in staging memory,
//! or where they landed, before their bytes go on. Either way a piece counts as arrived only when its blocks were
//! right, and one that was not ends the load. Blocks of records ([`crate::records`]) are right when their record is.
//!
//! # The kernel
//!
//! The driver makes it ready at the first use in a process, which takes from some ms to tenths of a second. A thread of
//! its own does that ([`Checks::load`]) while readers go on with the CPU's checksums; only DMA of what is to be checked
//! waits for it. Where there is none, or it fails, the CPU checks from then on: pieces that had been left to the GPU
//! are read again. A refusal is said in the report, and remembered for the process when it was the driver's.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use forebay_device::Device;
use forebay_device::cuda::{ChecksumKernel, CudaDevice};
use forebay_error::{Code, Error, Result};

use crate::engine::Engine;
use crate::plan::{Check, Piece, Plan};
use crate::records::Verdict;
use crate::report::Tally;
use crate::route::{Refused, refuse, refused};
use crate::shared::{Shared, internal};

const OFF: u8 = 0;
const LOADING: u8 = 1;
const ON: u8 = 2;

/// Whether the GPU checks blocks of this load. Goes from loading to on, and from either to off, never back.
pub(crate) struct Checks {
    state: AtomicU8,
    kernel: OnceLock<Arc<ChecksumKernel>>,
}

impl Checks {
    /// For a load that begins.
    pub(crate) fn new(engine: &Engine, plan: &Plan, tally: &Tally) -> Self {
        let checks = Self { state: AtomicU8::new(OFF), kernel: OnceLock::new() };
        let tuning = &engine.config().tuning;
        let Device::Cuda(gpu) = engine.device() else { return checks };
        let whole = plan.whole_checked_bytes();
        if !tuning.gpu_checks || whole == 0 || whole < tuning.gpu_checks_from_bytes {
            return checks;
        }
        if let Some(why) = refused(Refused::Checks, u64::from(gpu.ordinal())) {
            say(tally, &why);
            return checks;
        }
        checks.state.store(LOADING, Ordering::Release);
        if let Some(loaded) = ChecksumKernel::loaded(gpu) {
            checks.begin(gpu, loaded, tally);
        }
        checks
    }

    /// Makes the kernel ready. The device's context must be current on this thread.
    pub(crate) fn load(&self, gpu: &Arc<CudaDevice>, tally: &Tally) {
        self.begin(gpu, ChecksumKernel::get(gpu), tally);
    }

    fn begin(&self, gpu: &CudaDevice, loaded: Result<Option<Arc<ChecksumKernel>>>, tally: &Tally) {
        match loaded {
            Ok(Some(kernel)) => {
                let _ = self.kernel.set(kernel);
                // Unless it was ended meanwhile.
                let (from, to) = (LOADING, ON);
                let order = (Ordering::AcqRel, Ordering::Acquire);
                let _ = self.state.compare_exchange(from, to, order.0, order.1);
            }
            Ok(None) => {
                let lacks = Error::new(Code::Device, "the CUDA driver cannot launch kernels");
                self.end(gpu, &lacks, tally);
            }
            Err(error) => self.end(gpu, &error, tally),
        }
    }

    /// The CPU checks from now on, for `error`.
    pub(crate) fn end(&self, gpu: &CudaDevice, error: &Error, tally: &Tally) {
        self.state.store(OFF, Ordering::Release);
        // The driver's verdict; want of memory may pass.
        if error.code() == Code::Device {
            refuse(Refused::Checks, u64::from(gpu.ordinal()), error.what());
        }
        say(tally, error.what());
    }

    pub(crate) fn is_on(&self) -> bool {
        self.state.load(Ordering::Acquire) == ON
    }

    pub(crate) fn is_loading(&self) -> bool {
        self.state.load(Ordering::Acquire) == LOADING
    }

    pub(crate) fn is_off(&self) -> bool {
        self.state.load(Ordering::Acquire) == OFF
    }

    pub(crate) fn kernel(&self) -> Result<&Arc<ChecksumKernel>> {
        self.kernel.get().ok_or_else(|| internal("checks by a kernel that was not loaded"))
    }

    /// Whether blocks of this piece are left to the GPU now.
    pub(crate) fn take_from(&self, plan: &Plan, piece: &Piece) -> bool {
        self.is_on() && plan.landings_of(piece).any(|(_, places)| !places.is_empty())
    }
}

fn say(tally: &Tally, why: &str) {
    tally.refusal(&format!("checksums by the GPU: {why}; the CPU computes them instead"));
}

/// The blocks of a piece that the CPU has to check: all, or those that are not left to the GPU.
pub(crate) fn for_cpu<'a>(
    plan: &'a Plan,
    piece: &Piece,
    by_gpu: bool,
) -> impl Iterator<Item = &'a Check> {
    let blocks = plan.landings_of(piece);
    blocks.filter(move |(_, places)| !by_gpu || places.is_empty()).map(|(check, _)| check)
}

/// Checks what the CPU has to of a piece whose bytes are all here.
pub(crate) fn staged(shared: &Shared, piece: &Piece, bytes: &[u8], by_gpu: bool) -> Result<()> {
    for check in for_cpu(&shared.plan, piece, by_gpu) {
        let at = (check.offset - piece.offset) as usize;
        verify(shared, check, bytes.get(at..at + check.len as usize).unwrap_or_default())?;
    }
    Ok(())
}

/// Fails with `checksum` unless `bytes` are what was written.
pub(crate) fn verify(shared: &Shared, check: &Check, bytes: &[u8]) -> Result<()> {
    if bytes.len() as u64 != check.len {
        return Err(internal("a block is checked that is not all there"));
    }
    compare(shared, check, forebay_format::crc::crc32(bytes))
}

/// Fails with `checksum` unless this is the one of what was written: of a block of a record, once all of it is known.
pub(crate) fn compare(shared: &Shared, check: &Check, found: u32) -> Result<()> {
    match shared.records.of(&shared.plan, check, found)? {
        Verdict::Compare(check, found) => judge(shared, &check, found),
        Verdict::Wait => Ok(()),
        Verdict::Differs(before) => judge(shared, &Check { crc: before, ..*check }, found),
    }
}

fn judge(shared: &Shared, check: &Check, found: u32) -> Result<()> {
    if found == check.crc {
        return Ok(());
    }
    let (len, offset, wanted) = (check.len, check.offset, check.crc);
    let what = format!(
        "{len} bytes at byte {offset} have the checksum {found:08x}, {wanted:08x} was written"
    );
    let mut error = Error::new(Code::Checksum, what).at(shared.source(check.object)?.name());
    if let Some(name) = shared.plan.name_of(check) {
        error = error.within(format!("tensor {name:?}"));
    }
    Err(error.hint("the file was damaged after it was written: restore it from another copy"))
}

/// Counts the blocks of a piece that has arrived, as checked by the GPU where `by_gpu` and they are whole.
pub(crate) fn count(shared: &Shared, piece: &Piece, by_gpu: bool) {
    let all: u64 = shared.plan.checks_of(piece).iter().map(|check| check.len).sum();
    let by_cpu: u64 = for_cpu(&shared.plan, piece, by_gpu).map(|check| check.len).sum();
    shared.tally.verified(all - by_cpu, by_cpu);
}
