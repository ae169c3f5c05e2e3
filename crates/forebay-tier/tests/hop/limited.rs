//! Hops under limits: caps and priorities in virtual time, pauses in real time.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::Clock;
use forebay_checkpoint::progress::Unwatched;
use forebay_error::Code;
use forebay_store::MemoryStore;
use forebay_tier::hop::{HopOptions, Share, hop};
use forebay_tier::limits::{Caps, Direction, Limits, Priority};

use crate::world::{PART_BYTES, Virtual, data_bytes, files, options, side, source};

#[test]
fn a_hop_takes_the_time_that_its_cap_says() {
    let (from, to) = (source(), MemoryStore::new());
    let whole = data_bytes(&from);
    let clock = Arc::new(Virtual::default());
    let (here, mut there) = (side(Arc::new(from.clone())), side(Arc::new(to.clone())));
    let cap = NonZeroU64::new(50_000);
    there.limits = Arc::new(Limits::new(Arc::clone(&clock) as _, Caps { read: None, write: cap }));
    hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    let seconds = clock.now().as_secs_f64();
    let least = (whole - PART_BYTES) as f64 / 50_000.0;
    assert!((least * 0.99..=least * 1.05 + 1.4).contains(&seconds), "{seconds} s, {least}");
    assert_eq!(there.limits.passed().1, whole);
    assert_eq!(files(&from, 7), files(&to, 7));
}

/// 100 MB/s over windows of 10 s, through the calls that movers make, with sleeps that end when they should.
#[test]
fn a_cap_of_100_mb_a_second_holds_within_five_percent() {
    let clock = Arc::new(Virtual::default());
    let caps = Caps { read: NonZeroU64::new(100_000_000), write: None };
    let limits = Limits::new(Arc::clone(&clock) as _, caps);
    let part = 8 << 20;
    let mut went = Vec::new();
    while clock.now() < Duration::from_secs(40) {
        limits.take(Direction::Read, Priority::Archive, part).unwrap();
        went.push(clock.now());
    }
    for start in went.iter().take_while(|time| **time < Duration::from_secs(29)) {
        let end = *start + Duration::from_secs(10);
        let inside = went.iter().filter(|time| *start <= **time && **time < end).count() as u64;
        let moved = inside * part;
        assert!((950_000_000..=1_050_000_000).contains(&moved), "{moved} from {start:?}");
    }
}

/// When each part has gone, by a clock.
struct Times {
    clock: Arc<Virtual>,
    went: std::sync::Mutex<Vec<(Duration, u64)>>,
}

impl forebay_checkpoint::progress::Progress for Times {
    fn total(&self, _: u64) {}

    fn add(&self, bytes: u64) -> forebay_error::Result<()> {
        self.went.lock().unwrap().push((self.clock.now(), bytes));
        Ok(())
    }
}

/// The same through a hop, a ten thousandth as fast: every window of 10 s has what the cap says, within 5 %.
#[test]
fn a_cap_holds_within_five_percent_through_a_hop() {
    let (from, to) = (source(), MemoryStore::new());
    let clock = Arc::new(Virtual::default());
    let (here, mut there) = (side(Arc::new(from.clone())), side(Arc::new(to)));
    let caps = Caps { read: None, write: NonZeroU64::new(10_000) };
    there.limits = Arc::new(Limits::new(Arc::clone(&clock) as _, caps));
    let times = Times { clock, went: std::sync::Mutex::default() };
    let options = HopOptions { part_bytes: 1 << 10, ..options(Share::all()) };
    hop(&here, &there, 7, &options, &times).unwrap();
    let went = times.went.into_inner().unwrap();
    let (window, end) = (Duration::from_secs(10), went.last().unwrap().0);
    let mut windows = 0;
    for (start, _) in went.iter().take_while(|(time, _)| *time + window < end) {
        let inside = went.iter().filter(|(time, _)| *start <= *time && *time < *start + window);
        let moved: u64 = inside.map(|(_, bytes)| bytes).sum();
        assert!((95_000..=105_000).contains(&moved), "{moved} from {start:?}");
        windows += 1;
    }
    assert!(windows > 100, "{windows}");
}

#[test]
fn a_pause_takes_effect_within_a_part_and_a_stop_ends_the_wait() {
    let from = source();
    let (here, there) = (side(Arc::new(from.clone())), side(Arc::new(MemoryStore::new())));
    there.limits.pause();
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| hop(&here, &there, 7, &options(Share::all()), &Unwatched));
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(there.limits.passed(), (0, 0));
        there.limits.resume();
        while there.limits.passed().1 == 0 {
            std::thread::yield_now();
        }
        there.limits.pause();
        std::thread::sleep(Duration::from_millis(40));
        let passed = there.limits.passed();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(there.limits.passed(), passed);
        there.limits.close();
        if let Err(error) = moving.join().unwrap() {
            assert_eq!(error.code(), Code::Cancelled);
        }
    });
    assert!(there.limits.is_paused());
}

/// A restore that comes while the archive is being moved gets all that the cap gives.
#[test]
fn a_restore_goes_before_the_archive() {
    let limits = Arc::new(Limits::new(
        Arc::new(forebay_checkpoint::commit::SystemClock::default()),
        Caps { read: NonZeroU64::new(100_000), write: None },
    ));
    let take = |priority, parts: u32| {
        let limits = Arc::clone(&limits);
        std::thread::spawn(move || {
            for _ in 0..parts {
                limits.take(Direction::Read, priority, 3000).unwrap();
            }
            std::time::Instant::now()
        })
    };
    let archives = [take(Priority::Archive, 20), take(Priority::Archive, 20)];
    std::thread::sleep(Duration::from_millis(100));
    let restore = take(Priority::Restore, 10);
    let restored = restore.join().unwrap();
    for archive in archives {
        assert!(archive.join().unwrap() > restored);
    }
}
