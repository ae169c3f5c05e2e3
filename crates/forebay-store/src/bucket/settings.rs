//! How a store is reached: endpoint, credentials, limits.
//!
//! Values come from this structure first, then from the variables that the providers' own tools read (`AWS_*`,
//! `GOOGLE_*`, `AZURE_*`), then from their defaults. Secrets are not here: they come from the credential chain.

use std::path::PathBuf;
use std::time::Duration;

/// Least bytes of a part: what S3 allows is 5 MiB; 8 MiB costs a tenth of the requests' overhead less.
pub(super) const PART_BYTES_MIN: u64 = 8 << 20;
/// Most parts of an object: S3's and R2's limit. Azure's is 50,000 and GCS' XML interface 10,000.
pub(super) const PARTS_MAX: u64 = 10_000;

/// See the module. [`Default`] is what suits most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// URL of the server, for S3-compatible stores, GCS and Azure emulators; the provider's own where `None`. Plain
    /// HTTP is spoken only where it says `http://`.
    pub endpoint: Option<String>,
    /// Region of S3; `AWS_REGION`, `AWS_DEFAULT_REGION` or the profile's where `None`.
    pub region: Option<String>,
    /// Whether the bucket is in the path (true, also where `None`) or in the host name, for S3. With an endpoint and
    /// false, the endpoint must have the bucket in its host name.
    pub path_style: Option<bool>,
    /// A file of PEM certificates to trust beside the system's; `AWS_CA_BUNDLE` where `None`.
    pub ca_file: Option<PathBuf>,
    /// Where connections to the bucket leave this machine: an IP address of it, or the name of an interface (`eth1`).
    /// Credentials are asked for on the system's own route, and a name is resolved there.
    pub bind: Option<String>,
    /// KMS key that S3 is to encrypt with.
    pub sse_kms_key: Option<String>,
    /// Profile of the AWS configuration files, with SSO and credential processes; `AWS_PROFILE` where `None`. One that
    /// is named goes before all other credentials.
    pub profile: Option<String>,
    /// Most time for a request without bytes to move; [`min_rate`](Self::min_rate_bytes_s) adds to it. 20 s.
    pub request_timeout: Duration,
    /// Most time to connect. 5 s.
    pub connect_timeout: Duration,
    /// The slowest rate, in bytes a second, at which a request still counts as alive. 1 MB/s.
    pub min_rate_bytes_s: u64,
    /// Most tries of one request after the first. 8.
    pub retries: u32,
    /// Most time of all tries of one request, waits included. 2 minutes.
    pub retry_time: Duration,
    /// Retries of the whole store that may be ahead of its successes: one costs 5, a success gives 1 back, so that a
    /// store in trouble is not asked more often than one in five beyond that. 500.
    pub retry_budget: u32,
    /// Bytes of a part of an upload; more for objects that would have over 10,000, less than 8 MiB is not used.
    pub part_bytes: u64,
    /// Bytes of one ranged read; longer ones are split and read at once. 8 MiB.
    pub range_bytes: u64,
    /// Most requests in flight, each way. The store starts with 8 and finds what pays. 64.
    pub concurrency: usize,
    /// Memory for parts that are being filled or sent, of all objects together; at least four parts. 256 MiB.
    pub upload_bytes: u64,
    /// Whether reads that take much longer than others are asked for twice. At most one in twenty is.
    pub hedge: bool,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            endpoint: None,
            region: None,
            path_style: None,
            ca_file: None,
            bind: None,
            sse_kms_key: None,
            profile: None,
            request_timeout: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(5),
            min_rate_bytes_s: 1_000_000,
            retries: 8,
            retry_time: Duration::from_secs(120),
            retry_budget: 500,
            part_bytes: PART_BYTES_MIN,
            range_bytes: 8 << 20,
            concurrency: 64,
            upload_bytes: 256 << 20,
            hedge: true,
        }
    }
}

impl StoreSettings {
    /// Most time for a request that moves that many bytes.
    pub(super) fn timeout(&self, bytes: u64) -> Duration {
        let moving = Duration::from_secs(bytes / self.min_rate_bytes_s.max(1));
        self.request_timeout.saturating_add(moving)
    }

    /// Bytes of the parts of an object: at least 8 MiB, at most 10,000 of them, whole MiB.
    pub(super) fn part_bytes_of(&self, object_bytes: u64) -> u64 {
        const MIB: u64 = 1 << 20;
        let least = object_bytes.div_ceil(PARTS_MAX).div_ceil(MIB) * MIB;
        self.part_bytes.max(PART_BYTES_MIN).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_large_enough_and_not_too_many() {
        let settings = StoreSettings::default();
        for bytes in [0, 1, 8 << 20, 78 << 30, 80 << 30, 5 << 40] {
            let part = settings.part_bytes_of(bytes);
            assert!(part >= PART_BYTES_MIN && bytes.div_ceil(part) <= PARTS_MAX, "{bytes}");
        }
        assert_eq!(settings.part_bytes_of(1 << 30), PART_BYTES_MIN);
    }

    #[test]
    fn a_request_has_time_for_its_bytes() {
        let settings = StoreSettings::default();
        assert_eq!(settings.timeout(0), Duration::from_secs(20));
        assert_eq!(settings.timeout(30_000_000), Duration::from_secs(50));
    }
}
