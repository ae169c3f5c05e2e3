//! Emulators of Azure's and Google's stores.
//!
//! | emulator | of | from | does |
//! | --- | --- | --- | --- |
//! | Azurite | Azure blobs | npm | preconditions, blocks, metadata: all that is needed |
//! | fake-gcs-server | GCS | the Python index | Google's XML interface without PUT, which `google` adds; no parts |
//!
//! Both are reached by plain HTTP. Azurite's account and key are the well-known ones of every emulator of it.
//! **unsafe**: the credentials are set as variables of the process, which is where the product looks for them.

use std::net::SocketAddr;
use std::sync::Once;
use std::time::Duration;

use forebay_store::StoreSettings;

use super::{BUCKET, Server, ask, dying, free_port, google, program, start};

const ACCOUNT: &str = "devstoreaccount1";
pub(crate) const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
/// A signature with that key, until 2099, for making a container: who makes it need not sign then.
const SIGNED: &str = "sv=2020-08-04&ss=b&srt=sco&sp=rwdlac&se=2099-01-01T00%3A00%3A00Z&\
                      sig=x%2FQXZVVilc6CBdKa9TN6OcrIf0rB%2Fv0F0GVQBOwF7so%3D";

/// Azurite, in memory, with a container.
pub(crate) fn azurite() -> Option<Server> {
    let program = program("FOREBAY_TEST_AZURITE")?;
    let port = free_port();
    let mut command = dying(&program);
    command.args(["--inMemoryPersistence", "--silent", "--disableTelemetry"]);
    // The product's client may speak a newer version of the interface than it knows by name.
    command.args(["--skipApiVersionCheck", "--blobHost", "127.0.0.1"]);
    command.args(["--blobPort", &port.to_string()]);
    let address = start(command, port);
    let target = format!("/{ACCOUNT}/{BUCKET}?restype=container&{SIGNED}");
    let status = ask(address, &format!("PUT {target}"), "");
    assert!(status.contains("201"), "{status}");
    Some(Server { address, _folder: None })
}

/// How it is reached; its credentials are in the variables then.
pub(crate) fn azure(address: SocketAddr) -> StoreSettings {
    static ONCE: Once = Once::new();
    // SAFETY: what runs beside it reads variables through std, which has a lock; no name is resolved meanwhile.
    ONCE.call_once(|| unsafe {
        std::env::set_var("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT);
        std::env::set_var("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY);
    });
    StoreSettings { endpoint: Some(format!("http://{address}/{ACCOUNT}")), ..patient() }
}

/// fake-gcs-server, in memory, with a bucket; and the adapter that clients talk to.
pub(crate) fn gcs() -> Option<(Server, SocketAddr)> {
    let program = program("FOREBAY_TEST_GCS")?;
    let port = free_port();
    let mut command = dying(&program);
    command.args(["-scheme", "http", "-host", "127.0.0.1", "-port", &port.to_string()]);
    // By which host objects are asked for as XML.
    command.args(["-backend", "memory", "-public-host", "127.0.0.1"]);
    let address = start(command, port);
    let body = format!("{{\"name\":\"{BUCKET}\"}}");
    let status = ask(address, "POST /storage/v1/b?project=tests", &body);
    assert!(status.contains("200"), "{status}");
    Some((Server { address, _folder: None }, google::start(address)))
}

/// How it is reached. It asks for no credentials.
pub(crate) fn gcs_at(address: SocketAddr) -> StoreSettings {
    StoreSettings { endpoint: Some(format!("http://{address}")), ..patient() }
}

fn patient() -> StoreSettings {
    StoreSettings { request_timeout: Duration::from_secs(60), ..StoreSettings::default() }
}
