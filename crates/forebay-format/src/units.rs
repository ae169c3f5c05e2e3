//! Units of sizes and times as people write them, in the one table that the command's options and `forebay.toml` share.

/// Bytes of a unit, whatever its case: nothing, B, K, M, ... and KiB, MiB, ... (powers of 1024), KB, MB, ... (of 1000).
pub fn size_unit(unit: &str) -> Option<u64> {
    Some(match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "p" | "pib" => 1 << 50,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "pb" => 1_000_000_000_000_000,
        _ => return None,
    })
}

/// Seconds of a unit: nothing, ms, s, m or min, h, d, w.
pub fn time_unit(unit: &str) -> Option<f64> {
    Some(match unit.trim().to_ascii_lowercase().as_str() {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "w" => 7.0 * 86_400.0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_with_an_i_and_decimal_with_a_b() {
        assert_eq!(
            (size_unit("KiB"), size_unit(" kb"), size_unit("K")),
            (Some(1024), Some(1000), Some(1024))
        );
        assert_eq!((size_unit("PB"), size_unit("QB")), (Some(1_000_000_000_000_000), None));
        assert_eq!((time_unit("min"), time_unit("y")), (Some(60.0), None));
    }
}
