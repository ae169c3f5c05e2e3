//! `[tier.store]`: how a bucket is reached.

use forebay_error::Result;
use forebay_store::StoreSettings;

use super::section::Section;

/// Reads it. What is not said is as in [`StoreSettings`].
pub(super) fn read(mut section: Section<'_, '_>) -> Result<StoreSettings> {
    let default = StoreSettings::default();
    let count = |number: Option<u64>, default: usize| number.map_or(default, |n| n as usize);
    let small = |number: Option<u64>, default: u32| number.map_or(default, |n| n as u32);
    let most = u64::from(u32::MAX);
    let read = StoreSettings {
        endpoint: section.text("endpoint")?,
        region: section.text("region")?,
        path_style: section.flag("path_style", serde_json::Value::Null)?,
        ca_file: section.path("ca_file", None)?,
        bind: section.text("bind")?,
        sse_kms_key: section.text("sse_kms_key")?,
        profile: section.text("profile")?,
        request_timeout: section
            .time("request_timeout", Some(default.request_timeout))?
            .unwrap_or(default.request_timeout),
        connect_timeout: section
            .time("connect_timeout", Some(default.connect_timeout))?
            .unwrap_or(default.connect_timeout),
        min_rate_bytes_s: section
            .size("min_rate", Some(default.min_rate_bytes_s))?
            .unwrap_or(default.min_rate_bytes_s),
        retries: small(section.number("retries", Some(default.retries.into()), 0..=1000)?, 8),
        retry_time: section
            .time("retry_time", Some(default.retry_time))?
            .unwrap_or(default.retry_time),
        retry_budget: small(
            section.number("retry_budget", Some(default.retry_budget.into()), 0..=most)?,
            default.retry_budget,
        ),
        part_bytes: section
            .size("part_bytes", Some(default.part_bytes))?
            .unwrap_or(default.part_bytes),
        range_bytes: section
            .size("range_bytes", Some(default.range_bytes))?
            .unwrap_or(default.range_bytes),
        concurrency: count(
            section.number("concurrency", Some(default.concurrency as u64), 1..=1024)?,
            default.concurrency,
        ),
        upload_bytes: section
            .size("upload_bytes", Some(default.upload_bytes))?
            .unwrap_or(default.upload_bytes),
        hedge: section.flag("hedge", default.hedge.into())?.unwrap_or(default.hedge),
    };
    section.finish()?;
    Ok(read)
}
