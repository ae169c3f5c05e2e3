//! How connections to a store are made: whom they trust, what they wait for, which way they leave this machine.
//!
//! With [`bind`](super::StoreSettings::bind) requests to the bucket go through a client of our own, whose sockets are
//! bound to a source address or (`SO_BINDTODEVICE`) to an interface before they connect: the crate's own client has no
//! such option. In all else the two are the same, proxies of the environment included. Services that give credentials
//! are asked on the system's own route: those of a cloud's instances answer on no other.
//!
//! An address that this machine does not have, or an interface, is told when the store is opened; without that every
//! request would end as one that cannot connect.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use object_store::client::HttpClient;
use object_store::{Certificate, ClientOptions, HeaderValue};

use super::settings::StoreSettings;

const AGENT: &str = concat!("forebay/", env!("CARGO_PKG_VERSION"));
/// The kernel's interfaces, those of this process' network namespace. Two lines of headings come first.
const INTERFACES: &str = "/proc/net/dev";

/// See the module.
pub(super) struct Dial {
    plain: bool,
    connect_timeout: Duration,
    idle: usize,
    /// Certificates to trust beside the system's, in PEM.
    trusted: Option<Vec<u8>>,
    bind: Option<Bind>,
}

/// Which way out.
#[derive(Debug, PartialEq, Eq)]
enum Bind {
    Address(IpAddr),
    Interface(String),
}

impl Dial {
    /// Reads certificates, and looks for what is bound to. `ca`: the variable that names a file of certificates.
    ///
    /// Errors: `usage` for certificates that are none, and for a `bind` that this machine does not have; I/O.
    pub(super) fn new(settings: &StoreSettings, endpoint: Option<&str>, ca: &str) -> Result<Self> {
        let from_variable = || variable(&[ca]).map(PathBuf::from);
        let file = settings.ca_file.clone().or_else(from_variable);
        Ok(Self {
            plain: endpoint.is_some_and(is_plain),
            connect_timeout: settings.connect_timeout,
            idle: settings.concurrency.saturating_mul(2),
            trusted: file.as_deref().map(certificates).transpose()?,
            bind: settings.bind.as_deref().map(Bind::find).transpose()?,
        })
    }

    /// For the crate's clients.
    pub(super) fn options(&self) -> ClientOptions {
        let mut options = ClientOptions::new()
            .with_allow_http(self.plain)
            .with_connect_timeout(self.connect_timeout)
            .with_timeout_disabled()
            .with_pool_max_idle_per_host(self.idle)
            .with_user_agent(HeaderValue::from_static(AGENT));
        let trusted = self.trusted.as_deref().map(Certificate::from_pem_bundle);
        for certificate in trusted.into_iter().flatten().flatten() {
            options = options.with_root_certificate(certificate);
        }
        options
    }

    /// The client whose connections are bound; `None` where they are not to be.
    pub(super) fn bound(&self) -> Result<Option<HttpClient>> {
        let Some(bind) = &self.bind else { return Ok(None) };
        let builder = reqwest::Client::builder();
        let builder = match bind {
            Bind::Address(address) => builder.local_address(*address),
            Bind::Interface(name) => builder.interface(name),
        };
        let trusted = self.trusted.as_deref().map(reqwest::Certificate::from_pem_bundle);
        let built = builder
            .user_agent(AGENT)
            .https_only(!self.plain)
            .connect_timeout(self.connect_timeout)
            .pool_max_idle_per_host(self.idle)
            .tls_certs_merge(trusted.into_iter().flatten().flatten())
            .http1_only()
            // A body that was decompressed on the way would not be of the length that was asked for.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .dns_resolver(std::sync::Arc::new(Shuffled))
            .build();
        match built {
            Ok(client) => Ok(Some(HttpClient::new(client))),
            // What it says may have values in it.
            Err(_) => Err(Error::new(Code::Usage, "cannot make a client that binds its sockets")),
        }
    }
}

impl Bind {
    fn find(text: &str) -> Result<Self> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return match UdpSocket::bind(SocketAddr::new(address, 0)) {
                Ok(_) => Ok(Self::Address(address)),
                Err(error) => {
                    let what = format!("cannot bind to the source address {address}: {error}");
                    let error = Error::new(Code::Usage, what);
                    Err(error.hint("`bind` is an address of this machine: see `ip address`"))
                }
            };
        }
        let read = std::fs::read_to_string(INTERFACES);
        let table = read.map_err(|error| {
            Error::io("cannot list the network interfaces", error).at(INTERFACES)
        })?;
        let there = interfaces(&table);
        if there.contains(&text) {
            return Ok(Self::Interface(text.to_owned()));
        }
        let what = format!("no network interface is called `{}`", text.escape_debug());
        let hint = format!("`bind` is an IP address or one of: {}", there.join(", "));
        Err(Error::new(Code::Usage, what).hint(hint))
    }
}

/// Their names in the kernel's table.
fn interfaces(table: &str) -> Vec<&str> {
    let names = table.lines().skip(2).filter_map(|line| line.split(':').next());
    names.map(str::trim).filter(|name| !name.is_empty()).collect()
}

fn certificates(file: &Path) -> Result<Vec<u8>> {
    let pem = std::fs::read(file).map_err(|error| {
        Error::io("cannot read certificates to trust", error).at(file.display())
    })?;
    match Certificate::from_pem_bundle(&pem) {
        Ok(bundle) if !bundle.is_empty() => Ok(pem),
        _ => Err(Error::new(Code::Usage, "no PEM certificates").at(file.display())),
    }
}

/// The system's names, in an order of chance: a store's many addresses share the connections.
struct Shuffled;

impl reqwest::dns::Resolve for Shuffled {
    fn resolve(&self, name: reqwest::dns::Name) -> reqwest::dns::Resolving {
        Box::pin(async move {
            let look = move || (name.as_str(), 0).to_socket_addrs();
            let found = tokio::task::spawn_blocking(look).await??;
            let mut found: Vec<SocketAddr> = found.collect();
            let chance = std::hash::RandomState::new();
            found.sort_by_cached_key(|address| std::hash::BuildHasher::hash_one(&chance, address));
            let found: reqwest::dns::Addrs = Box::new(found.into_iter());
            Ok(found)
        })
    }
}

pub(super) fn is_plain(endpoint: &str) -> bool {
    endpoint.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("http://"))
}

/// The first of the variables that is set.
pub(super) fn variable(names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_machine_has_is_bound_to() {
        assert_eq!(Bind::find("127.0.0.2").unwrap(), Bind::Address([127, 0, 0, 2].into()));
        assert_eq!(Bind::find("lo").unwrap(), Bind::Interface("lo".to_owned()));
        // Of a range for documentation: nobody has it.
        for absent in ["198.51.100.7", "eth-no", "", "lo ", "127.0.0.1:80", "a-name-of-17-bytes"] {
            let error = Bind::find(absent).unwrap_err();
            assert_eq!(error.code(), Code::Usage, "{absent}");
            assert!(!error.hints().is_empty(), "{absent}");
        }
        assert!(Bind::find("eth-no").unwrap_err().hints()[0].contains("lo"));
    }

    #[test]
    fn interfaces_are_read() {
        let table = "Inter-|   Receive\n face |bytes\n    lo: 1 2\n  eth1.7: 3\nib0:4\n";
        assert_eq!(interfaces(table), ["lo", "eth1.7", "ib0"]);
        assert!(interfaces("").is_empty());
    }
}
