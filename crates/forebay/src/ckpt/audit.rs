//! `forebay ckpt audit`: prints an audit log, and checks the chain of its hashes.
//!
//! JSON: `{"path", "records": [{"number", "unix_ms", "who", "what", ..., "hash"}], "head", "torn_bytes"}`. A log that
//! is not what it should be is an error, and prints what is sound before the fault.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use forebay_error::Result;
use forebay_format::hex;
use forebay_tier::audit_log::{Record, Verified, verify};
use serde::Serialize;

use super::Outcome;
use crate::console::{Console, clean};
use crate::interrupt;

const HELP: &str = "\
Each record is bound to all before it by a hash. What the chain cannot show is that its end was cut
off or all of it written anew: note `N:HASH` of the last line somewhere else, and give it as
--expect the next time.

Exit codes: 0 sound; 1 changed, cut, or not readable; 2 wrong usage.";

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct AuditArgs {
    /// The log
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Records and the hash of the last of them, as noted earlier: these must be there still
    #[arg(long, value_name = "N:HASH", value_parser = noted)]
    pub(crate) expect: Option<(u64, [u8; 32])>,
    /// Only check
    #[arg(long)]
    pub(crate) check: bool,
}

#[derive(Serialize)]
struct Report {
    path: String,
    records: Vec<Line>,
    head: String,
    torn_bytes: u64,
}

#[derive(Serialize)]
struct Line {
    number: u64,
    unix_ms: u64,
    #[serde(flatten)]
    event: forebay_tier::audit_log::Event,
    hash: String,
}

/// Runs it.
pub(super) fn run(args: &AuditArgs, console: &Console) -> Result<Outcome> {
    let mut lines = Vec::new();
    let keeps = console.is_json() && !args.check;
    let found = verify(&args.path, args.expect, |record| {
        interrupt::check()?;
        match (keeps, args.check || console.is_json()) {
            (true, _) => lines.push(line(record)),
            (false, true) => {}
            (false, false) => console.print(|out| print(out, record))?,
        }
        Ok(())
    })?;
    if found.torn_bytes > 0 {
        let bytes = found.torn_bytes;
        console.warning(&format!("{bytes} bytes of a record that was not written to its end"));
    }
    let written = match console.is_json() {
        true => console.json(&Report {
            path: args.path.display().to_string(),
            records: lines,
            head: head(&found),
            torn_bytes: found.torn_bytes,
        }),
        false => console.print(|out| writeln!(out, "sound: {}", head(&found))),
    };
    Outcome::Good.told(written, console)
}

/// What to note: records, and the hash of the last.
fn head(found: &Verified) -> String {
    format!("{}:{}", found.records, hex(&found.head))
}

fn line(record: &Record) -> Line {
    let (number, unix_ms) = (record.number, record.unix_ms);
    Line { number, unix_ms, event: record.event.clone(), hash: hex(&record.hash) }
}

fn print(out: &mut dyn Write, record: &Record) -> std::io::Result<()> {
    let event = &record.event;
    write!(out, "{} {} {}", record.number, time(record.unix_ms), clean(&event.what))?;
    if let Some(step) = event.step {
        write!(out, " step {step}")?;
    }
    let texts = [("attempt", &event.attempt), ("from", &event.from), ("to", &event.to)];
    for (name, text) in texts {
        if let Some(text) = text {
            write!(out, " {name} {}", clean(text))?;
        }
    }
    write!(out, " by {} ({})", clean(&event.who), clean(&event.origin))?;
    if let Some(checksum) = &event.checksum {
        write!(out, " {}", clean(checksum.get(..16).unwrap_or(checksum)))?;
    }
    match &event.note {
        Some(note) => writeln!(out, ": {}", clean(note)),
        None => writeln!(out),
    }
}

/// `2026-11-30T12:00:00Z`, from milliseconds since 1970.
fn time(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a number of days since 1970, by eras of 400 years that begin in March.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

/// Reads `N:HASH`.
fn noted(text: &str) -> std::result::Result<(u64, [u8; 32]), String> {
    let no = || "not N:HASH, with 64 hex digits".to_owned();
    let (records, hash) = text.split_once(':').ok_or_else(no)?;
    let records = records.parse().map_err(|_| no())?;
    let bytes = hash.as_bytes();
    let mut found = [0; 32];
    if bytes.len() != 64 || !bytes.iter().all(u8::is_ascii_hexdigit) {
        return Err(no());
    }
    for (byte, pair) in found.iter_mut().zip(bytes.chunks(2)) {
        let digits = std::str::from_utf8(pair).map_err(|_| no())?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| no())?;
    }
    Ok((records, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_as_people_write_them() {
        assert_eq!(time(0), "1970-01-01T00:00:00Z");
        assert_eq!(time(951_782_400_000), "2000-02-29T00:00:00Z");
        assert_eq!(time(1_767_225_599_999), "2025-12-31T23:59:59Z");
        assert_eq!(time(1_767_225_600_000), "2026-01-01T00:00:00Z");
    }

    #[test]
    fn what_was_noted_is_read() {
        let hash = "0".repeat(63) + "f";
        let (records, bytes) = noted(&format!("7:{hash}")).unwrap();
        assert_eq!((records, bytes[31], bytes[0]), (7, 15, 0));
        for bad in ["7", "7:ff", "x:00", &format!("7:{}", "+f".repeat(32))] {
            assert!(noted(bad).is_err(), "{bad}");
        }
    }
}
