//! Sizes, rates and times as people read and write them. Rates and totals are decimal (GB is 10^9 bytes, as links and
//! disks are sold); limits of memory are binary (GiB is 2^30), as memory is.

use forebay_format::units::{size_unit, time_unit};

/// Reads a size: digits, then nothing or a unit of [`size_unit`].
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits).unwrap_or((text, ""));
    let number: u64 = number.parse().map_err(|_| "not a size such as 512MiB".to_owned())?;
    let unknown = || format!("unknown unit `{}`; say KiB, MiB or GiB", unit.trim());
    let factor = size_unit(unit).ok_or_else(unknown)?;
    number.checked_mul(factor).ok_or_else(|| "more than 2^64 bytes".to_owned())
}

/// Reads a time: a number, then nothing or a unit of [`time_unit`].
pub(crate) fn parse_seconds(text: &str) -> Result<std::time::Duration, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits).unwrap_or((text, ""));
    let number: f64 = number.parse().map_err(|_| "not a time such as 10min".to_owned())?;
    let unknown = || format!("unknown unit `{}`; say s, min, h or d", unit.trim());
    let factor = time_unit(unit).ok_or_else(unknown)?;
    let seconds = number * factor;
    match (0.0..1e9).contains(&seconds) {
        true => Ok(std::time::Duration::from_secs_f64(seconds)),
        false => Err("more than thirty years".to_owned()),
    }
}

/// `1.24 GB`
pub(crate) fn decimal(bytes: u64) -> String {
    scaled(bytes, 1000.0, &["B", "KB", "MB", "GB", "TB", "PB"])
}

/// `1.15 GiB`
pub(crate) fn binary(bytes: u64) -> String {
    scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

fn scaled(bytes: u64, step: f64, units: &[&str]) -> String {
    let mut value = bytes as f64;
    let mut unit = units.first().copied().unwrap_or_default();
    for next in units.iter().skip(1) {
        if value < step {
            break;
        }
        value /= step;
        unit = next;
    }
    let digits = if unit == "B" || value >= 100.0 || value == value.trunc() { 0 } else { 2 };
    format!("{value:.digits$} {unit}")
}

/// GB/s, with as many digits as mean something.
pub(crate) fn rate(gb_per_s: f64) -> String {
    let digits = if gb_per_s < 10.0 { 2 } else { 1 };
    format!("{gb_per_s:.digits$} GB/s")
}

/// `2026-11-30 12:16:42 UTC`, of seconds since 1970; `None` past the year 9999.
pub(crate) fn utc(seconds: u64) -> Option<String> {
    /// Days of 400 years, after which the calendar repeats.
    const ERA_DAYS: u64 = 146_097;
    /// From the first of March of the year 0, where years start here so that leap days come last, to 1970.
    const EPOCH_DAYS: u64 = 719_468;
    let days = seconds / 86_400 + EPOCH_DAYS;
    let (era, day) = (days / ERA_DAYS, days % ERA_DAYS);
    // Without the leap days before it: every 4 years, not every 100, every 400.
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // Months from March on have 31, 30, 31, 30, 31 days, over and over.
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    (year <= 9999)
        .then(|| format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC"))
}

/// `12.3 s` or `45.6 ms`
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.0} us", s * 1e6),
    }
}

/// `1 file`, `2 files`
pub(crate) fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// GB (10^9 bytes) a second; 0 for no time at all.
pub(crate) fn gb_per_s(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / 1e9 / seconds } else { 0.0 }
}

/// CPU milliseconds a GB; `None` for no bytes.
pub(crate) fn ms_per_gb(cpu_seconds: f64, bytes: u64) -> Option<f64> {
    (bytes > 0).then(|| cpu_seconds * 1e3 / (bytes as f64 / 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_dates() {
        // As `date -u -d @N` has them.
        for (seconds, date) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (1_796_041_002, "2026-11-30 12:16:42 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
            (253_402_300_799, "9999-12-31 23:59:59 UTC"),
        ] {
            assert_eq!(utc(seconds).as_deref(), Some(date));
        }
        assert_eq!(utc(253_402_300_800), None);
        assert_eq!(utc(u64::MAX), None);
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64MiB"), Ok(64 << 20));
        assert_eq!(parse_size("2 g"), Ok(2 << 30));
        assert_eq!(parse_size("3GB"), Ok(3_000_000_000));
        for bad in ["", "x", "-1", "1.5G", "1Q", "99999999999999999999", "17179869185G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_are_read() {
        let seconds = |text: &str| parse_seconds(text).map(|time| time.as_secs_f64());
        assert_eq!(seconds("1.5"), Ok(1.5));
        assert_eq!(seconds("10min"), Ok(600.0));
        assert_eq!(seconds("2 h"), Ok(7200.0));
        for bad in ["", "x", "-1", "1 y", "99999999999"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_shown() {
        assert_eq!(decimal(0), "0 B");
        assert_eq!(decimal(999), "999 B");
        assert_eq!(decimal(1_240_000_000), "1.24 GB");
        assert_eq!(binary(1 << 30), "1 GiB");
        assert_eq!(binary(u64::MAX), "16384 PiB");
        assert_eq!(seconds(0.0456), "45.6 ms");
    }
}
