//! Which way connections leave this machine, and whom they trust.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod servers;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use forebay_error::Code;
use forebay_store::{ObjectStore, Store, StoreSettings, open_store};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use servers::proxy::{self, Action};
use servers::{Server, fresh_url, settings};

static S3S: LazyLock<Option<Server>> = LazyLock::new(servers::s3s);

/// The addresses that requests of a store come from: small ones, data, listings by hand.
fn peers(bind: Option<&str>) -> Option<BTreeSet<IpAddr>> {
    let server = S3S.as_ref()?;
    let seen: Arc<Mutex<BTreeSet<IpAddr>>> = Arc::default();
    let own = Arc::clone(&seen);
    let address = proxy::start(server.address, move |request| {
        own.lock().unwrap().insert(request.peer);
        Action::Pass
    });
    let settings = StoreSettings { bind: bind.map(str::to_owned), ..settings(address) };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    store.put("a", b"1").unwrap();
    let data = store.create_data("data", 1000).unwrap();
    forebay_engine::write_all_at(data.sink(), &[1; 1000], 0).unwrap();
    data.seal().unwrap();
    assert_eq!(store.open_data("data").unwrap().len(), 1000);
    assert_eq!(store.list("", 9).unwrap().len(), 2);
    store.unfinished("", 9).unwrap();
    assert!(store.remove("a").unwrap());
    let seen = seen.lock().unwrap().clone();
    Some(seen)
}

#[test]
fn requests_leave_by_the_address_or_interface_that_is_said() {
    let one = |address: [u8; 4]| BTreeSet::from([IpAddr::from(address)]);
    let Some(seen) = peers(Some("127.0.0.2")) else { return };
    assert_eq!(seen, one([127, 0, 0, 2]));
    assert_eq!(peers(Some("lo")).unwrap(), one([127, 0, 0, 1]));
    assert_eq!(peers(None).unwrap(), one([127, 0, 0, 1]));
}

#[test]
fn an_interface_that_leads_nowhere_near_is_not_gone_around() {
    // What is bound to another interface than lo does not reach what listens there.
    let Some(other) = std::fs::read_dir("/sys/class/net").ok().and_then(|entries| {
        let names = entries.flatten().map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name != "lo" && name != "bonding_masters").min()
    }) else {
        println!("skipped: there is no interface but lo");
        return;
    };
    let Some(server) = S3S.as_ref() else { return };
    let settings = StoreSettings {
        bind: Some(other),
        retries: 0,
        connect_timeout: Duration::from_millis(500),
        ..settings(server.address)
    };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    let error = store.get("a", 9).unwrap_err();
    assert!(matches!(error.code(), Code::Io | Code::Timeout), "{error:?}");
}

#[test]
fn what_this_machine_does_not_have_is_told_at_the_opening() {
    for url in ["s3://b/x", "gs://b/x", "az://b/x"] {
        for bind in ["eth-no", "198.51.100.7"] {
            let bind = Some(bind.to_owned());
            let settings = StoreSettings { bind, ..StoreSettings::default() };
            let error = open_store(url, &settings).err().unwrap();
            assert_eq!(error.code(), Code::Usage, "{url}");
            assert!(error.render().contains("bind"), "{}", error.render());
        }
    }
}

/// A server that speaks TLS with that certificate, and says of every object that it is not there.
fn with_tls(certificate: CertificateDer<'static>, key: PrivateKeyDer<'static>) -> SocketAddr {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let (config, listener) = (Arc::new(config), TcpListener::bind("127.0.0.1:0").unwrap());
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut tls = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut stream = rustls::Stream::new(&mut tls, &mut stream);
            let head = BufReader::new(&mut stream).lines().map_while(Result::ok);
            // Who does not trust it ends the connection.
            if head.take_while(|line| !line.is_empty()).count() > 0 {
                let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close";
                let _ = stream.write_all(format!("{answer}\r\n\r\n").as_bytes());
            }
        }
    });
    address
}

fn get_from(address: SocketAddr, ca_file: Option<&Path>, bind: Option<&str>) -> Option<Code> {
    let settings = StoreSettings {
        endpoint: Some(format!("https://localhost:{}", address.port())),
        ca_file: ca_file.map(Path::to_owned),
        bind: bind.map(str::to_owned),
        retries: 0,
        ..settings(address)
    };
    let store = ObjectStore::open("s3://b/x", &settings).unwrap();
    match store.get("a", 9) {
        Ok(found) => {
            assert!(found.is_none());
            None
        }
        Err(error) => Some(error.code()),
    }
}

#[test]
fn certificates_are_trusted_with_and_without_a_binding() {
    let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(pair.signing_key.serialize_der()).unwrap();
    let address = with_tls(pair.cert.der().clone(), key);
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, pair.cert.pem()).unwrap();
    for bind in [None, Some("127.0.0.2"), Some("lo")] {
        assert_eq!(get_from(address, Some(&ca), bind), None, "{bind:?}");
        assert_eq!(get_from(address, None, bind), Some(Code::Io), "not trusted: {bind:?}");
    }
}
