//! One object between a file and a store, timed: what `bench/host/store_rates.py` runs for Forebay.
//!
//!     transfer put FILE URL KEY [--threads N] [--memory MIB]
//!     transfer get FILE URL KEY [--threads N] [--range MIB]
//!
//! Prints a line of JSON: bytes, seconds of wall and CPU time (user and system, all threads), the most memory that was
//! resident, and the most that parts of uploads took.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use forebay_store::{ObjectStore, Store, StoreSettings};

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Bytes that a thread takes at a time from a file: two parts of an upload.
const PIECE: u64 = 8 << 20;

/// Ranges that a thread asks for at once.
const RANGES: u64 = 4;

fn main() -> Result {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [what, file, url, key, options @ ..] = words.as_slice() else {
        return Err(
            "transfer put|get FILE URL KEY [--threads N] [--memory MIB] [--range MIB]".into()
        );
    };
    let (mut threads, mut settings) = (2, StoreSettings::default());
    for option in options.chunks(2) {
        let [name, value] = option else { return Err("an option has no value".into()) };
        let value: u64 = value.parse()?;
        match name.as_str() {
            "--threads" => threads = value.max(1),
            "--memory" => settings.upload_bytes = value << 20,
            "--range" => settings.range_bytes = value << 20,
            "--requests" => settings.concurrency = usize::try_from(value)?,
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    let store = ObjectStore::open(url, &settings)?;
    store.probe()?;
    let (cpu, start) = (cpu_seconds(), Instant::now());
    let bytes = match what.as_str() {
        "put" => put(&store, key, file, threads)?,
        "get" => get(&store, key, file, threads, settings.range_bytes)?,
        other => return Err(format!("{other} is neither put nor get").into()),
    };
    let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let parts = store.traffic().upload_bytes_peak;
    let peak = peak_bytes()?;
    writeln!(
        std::io::stdout(),
        concat!(
            r#"{{"bytes": {}, "wall": {:.4}, "cpu": {:.4}, "#,
            r#""peak_bytes": {}, "part_bytes": {}}}"#
        ),
        bytes,
        wall,
        cpu,
        peak,
        parts
    )?;
    Ok(())
}

fn put(store: &ObjectStore, key: &str, file: &str, threads: u64) -> Result<u64> {
    let file = File::open(file)?;
    let bytes = file.metadata()?.len();
    let object = store.create_data(key, bytes)?;
    each_piece(bytes, PIECE, threads, |at, buffer| {
        file.read_exact_at(buffer, at)?;
        let mut done = 0;
        while done < buffer.len() {
            let rest = buffer.get(done..).unwrap_or_default();
            done += object.sink().write_at(rest, at + done as u64)?;
        }
        Ok(())
    })?;
    object.seal()?;
    Ok(bytes)
}

fn get(store: &ObjectStore, key: &str, file: &str, threads: u64, range: u64) -> Result<u64> {
    let source = store.open_data(key)?;
    let file = File::create(file)?;
    each_piece(source.len(), range * RANGES, threads, |at, buffer| {
        let mut done = 0;
        while done < buffer.len() {
            let rest = buffer.get_mut(done..).unwrap_or_default();
            done += source.read_at(rest, at + done as u64)?;
        }
        file.write_all_at(buffer, at)?;
        Ok(())
    })?;
    Ok(source.len())
}

/// Pieces in order, each by one of several threads that have a buffer each.
fn each_piece(
    bytes: u64,
    piece: u64,
    threads: u64,
    work: impl Fn(u64, &mut [u8]) -> Result + Sync,
) -> Result {
    let next = AtomicU64::new(0);
    let run = || -> Result {
        let mut buffer = vec![0; usize::try_from(piece)?];
        loop {
            let at = next.fetch_add(piece, Ordering::Relaxed);
            let count = usize::try_from(bytes.saturating_sub(at).min(piece))?;
            match buffer.get_mut(..count) {
                Some(part) if count > 0 => work(at, part)?,
                _ => return Ok(()),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
    })
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn peak_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? * 1024)
}
