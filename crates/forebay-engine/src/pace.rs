//! How fast page cache registers with a GPU, and whether DMA is worth it at that pace.
//!
//! # Why
//!
//! The pump is one thread: while it registers it queues no copies, so slow registering takes from the link what it was
//! to add. Two machines of one kind, with the same link (55.3 GB/s) and 16 threads: where 64 MiB register in 1.4 ms
//! (48 GB/s), DMA and six readers give 53 GB/s and copies alone 51; where they take 2 ms and more (27 to 33 GB/s), 43
//! and 50. A warm load must not be slower than the same load without DMA, so the pump measures, and where enough
//! readers can take over it stops.
//!
//! # How
//!
//! [`Pace`] is one load's figure: after a trial of some batches the rate over those, then that of the last
//! [`WINDOW_BATCHES`], each time without the slowest, whose thread may have been interrupted. What was found slow is
//! remembered for the process by file system and GPU, so that the next load copies from its first byte; and forgotten
//! after a while, because what makes it slow (how the page cache lies in memory, who else takes the locks) changes.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::options::Tuning;
use crate::shared::lock;

/// Batches that the moving figure is made of: 0.5 GiB, so that a load of a few GB still gains by stopping.
const WINDOW_BATCHES: usize = 8;

/// Readers that nearly fill a link without DMA: of the page cache of ext4, 7 gave 51 GB/s of 55 and 14 gave 50; of
/// tmpfs, 7 gave 42. With fewer, even slow DMA adds more than it takes.
const READERS_FILL_LINK: usize = 8;

/// A batch smaller than this share of the usual size is mostly fixed costs, and says nothing of the rate.
const WHOLE_SHARE: u64 = 4;

/// Readers of a load without DMA. A pump that only forwards slots still needs its moments: one processor in eight stays
/// free for it and for interrupts (16 readers on 16 cores: 46 GB/s from tmpfs, 14: 52).
pub(crate) fn readers_without_dma(threads: usize) -> usize {
    threads - threads / 8
}

/// Whether copies can take over from DMA.
pub(crate) fn copies_fill_link(threads: usize) -> bool {
    readers_without_dma(threads) >= READERS_FILL_LINK
}

/// In words, for the report.
pub(crate) fn slow(bytes_per_s: f64) -> String {
    let gigabytes = bytes_per_s / 1e9;
    let digits = if gigabytes < 10.0 { 2 } else { 0 };
    format!("registering runs at {gigabytes:.digits$} GB/s here, copies are faster")
}

/// The pace of one load on the file system that it is at.
#[derive(Default)]
pub(crate) struct Pace {
    file_system: Option<u64>,
    /// Bytes and seconds of the last batches.
    batches: VecDeque<(u64, f64)>,
}

impl Pace {
    /// Notes that a batch of this file system was mapped and registered.
    pub(crate) fn add(&mut self, tuning: &Tuning, file_system: u64, bytes: u64, took: Duration) {
        if self.file_system.replace(file_system) != Some(file_system) {
            self.batches.clear();
        }
        if bytes < tuning.dma_batch_bytes / WHOLE_SHARE {
            return;
        }
        if self.batches.len() >= WINDOW_BATCHES.max(tuning.dma_trial_batches) {
            self.batches.pop_front();
        }
        self.batches.push_back((bytes, took.as_secs_f64()));
    }

    /// File system and rate in bytes a second, once the trial is over and if that is too slow.
    pub(crate) fn too_slow(&self, tuning: &Tuning) -> Option<(u64, f64)> {
        if self.batches.len() < tuning.dma_trial_batches.max(1) {
            return None;
        }
        let rate = self.rate()?;
        (rate < tuning.dma_rate_min_bytes_per_s as f64).then_some((self.file_system?, rate))
    }

    /// Bytes a second of the last batches; of three and more without the slowest.
    fn rate(&self) -> Option<f64> {
        let per_byte = |batch: &&(u64, f64)| batch.1 / batch.0.max(1) as f64;
        let mut bytes: u64 = self.batches.iter().map(|batch| batch.0).sum();
        let mut seconds: f64 = self.batches.iter().map(|batch| batch.1).sum();
        let slowest =
            self.batches.iter().max_by(|one, other| per_byte(one).total_cmp(&per_byte(other)));
        if let Some(slowest) = slowest
            && self.batches.len() >= 3
        {
            bytes -= slowest.0;
            seconds -= slowest.1;
        }
        (seconds > 0.0).then(|| bytes as f64 / seconds)
    }
}

/// File system and GPU (its ordinal).
type Place = (u64, u32);

/// What was found slow, in bytes a second, and when.
static SLOW: Mutex<Option<HashMap<Place, (f64, Instant)>>> = Mutex::new(None);

/// A machine with thousands of mounts that come and go must not grow the table for ever.
const PLACES_MAX: usize = 4096;

/// Remembers a rate that was too slow.
pub(crate) fn remember(file_system: u64, gpu: u32, bytes_per_s: f64) {
    let mut slow = lock(&SLOW);
    let slow = slow.get_or_insert_with(HashMap::new);
    if slow.len() >= PLACES_MAX {
        slow.clear();
    }
    slow.insert((file_system, gpu), (bytes_per_s, Instant::now()));
}

/// The rate that is remembered, if it is too slow and not too old.
pub(crate) fn remembered(tuning: &Tuning, file_system: u64, gpu: u32) -> Option<f64> {
    let slow = lock(&SLOW);
    let &(rate, since) = slow.as_ref()?.get(&(file_system, gpu))?;
    let counts =
        since.elapsed() < tuning.dma_retry_after && rate < tuning.dma_rate_min_bytes_per_s as f64;
    counts.then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: u64 = 64 << 20;

    fn tuning() -> Tuning {
        Tuning { dma_batch_bytes: BATCH, ..Tuning::default() }
    }

    fn pace_of(micros: &[u64]) -> Pace {
        let mut pace = Pace::default();
        micros.iter().for_each(|&us| pace.add(&tuning(), 1, BATCH, Duration::from_micros(us)));
        pace
    }

    #[test]
    fn the_two_machines_are_told_apart_after_the_trial() {
        let slow = pace_of(&[2000, 2100, 2600]).too_slow(&tuning());
        let (file_system, rate) = slow.unwrap();
        assert_eq!(file_system, 1);
        assert!((rate - 2.0 * BATCH as f64 / 4.1e-3).abs() < 1e3, "{rate}");
        assert!(pace_of(&[2000, 2100]).too_slow(&tuning()).is_none(), "no verdict in the trial");
        assert!(pace_of(&[1400, 1450, 1500]).too_slow(&tuning()).is_none());
    }

    #[test]
    fn one_interruption_is_no_verdict_and_a_change_is_one() {
        assert!(pace_of(&[9000, 1400, 1400]).too_slow(&tuning()).is_none());
        let mut micros = vec![1400; 20];
        micros.push(40_000);
        assert!(pace_of(&micros).too_slow(&tuning()).is_none());
        micros.extend([2500; 5]);
        assert!(pace_of(&micros).too_slow(&tuning()).is_some());
    }

    #[test]
    fn small_batches_and_other_file_systems_do_not_count() {
        let mut pace = pace_of(&[2500, 2500]);
        pace.add(&tuning(), 1, BATCH / 8, Duration::from_millis(5));
        assert!(pace.too_slow(&tuning()).is_none());
        pace.add(&tuning(), 2, BATCH, Duration::from_micros(2500));
        assert!(pace.too_slow(&tuning()).is_none(), "another file system, another trial");
    }

    #[test]
    fn a_verdict_holds_for_its_place_its_limit_and_its_time() {
        let place = u64::MAX;
        remember(place, 7, 27e9);
        assert_eq!(remembered(&tuning(), place, 7), Some(27e9));
        assert_eq!(remembered(&tuning(), place, 8), None);
        assert_eq!(remembered(&tuning(), place - 1, 7), None);
        let patient = Tuning { dma_rate_min_bytes_per_s: 20_000_000_000, ..tuning() };
        assert_eq!(remembered(&patient, place, 7), None);
        std::thread::sleep(Duration::from_millis(2));
        let short = Tuning { dma_retry_after: Duration::from_millis(1), ..tuning() };
        assert_eq!(remembered(&short, place, 7), None);
    }

    #[test]
    fn eight_readers_take_over() {
        let enough: Vec<_> = (1..=16).filter(|&threads| copies_fill_link(threads)).collect();
        assert_eq!(enough, (9..=16).collect::<Vec<_>>());
        assert_eq!(slow(27.4e9), "registering runs at 27 GB/s here, copies are faster");
        assert_eq!(slow(0.05e9), "registering runs at 0.05 GB/s here, copies are faster");
    }
}
