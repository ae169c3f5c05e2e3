//! From a place and settings to a connection. Nothing is sent yet.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_error::{Code, Error, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::HttpConnector;
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder};
use object_store::list::PaginatedListStore;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::{RetryConfig, StaticCredentialProvider};
use url::Url;

use super::client::Client;
use super::dial::{Dial, is_plain, variable};
use super::place::Provider;
use super::renewal::Renewal;
use super::runtime;
use super::settings::StoreSettings;
use super::unfinished::Uploads;
use super::wire::Connector;

/// What the crate takes where none is said.
const REGION: &str = "us-east-1";

/// A provider's client from all sides.
pub(super) struct Stores {
    pub(super) objects: Arc<dyn object_store::ObjectStore>,
    /// The same, but deletes objects one by one: not every server understands S3's request for many.
    pub(super) singly: Arc<dyn object_store::ObjectStore>,
    pub(super) multipart: Arc<dyn MultipartStore>,
    /// Where it lists by pages.
    pub(super) pages: Option<Arc<dyn PaginatedListStore>>,
    /// Where uploads that never ended can be listed.
    pub(super) uploads: Option<Uploads>,
    /// Of its credentials.
    pub(super) renewal: Renewal,
}

/// A bucket's connection.
pub(super) fn bucket(
    provider: Provider,
    bucket: &str,
    prefix: &str,
    settings: &StoreSettings,
) -> Result<Client> {
    let handle = runtime::handle()?;
    let name = format!("{}://{bucket}/{prefix}", provider.scheme());
    let name = name.trim_end_matches('/').to_owned();
    let stores = match provider {
        Provider::S3 => s3(bucket, settings, &handle),
        Provider::Gcs => gcs(bucket, settings),
        Provider::Azure => azure(bucket, settings),
    };
    let stores = stores.map_err(|error| error.at(&name))?;
    Ok(Client::new(name, prefix.to_owned(), Some(provider), stores, settings, handle))
}

/// A store in this process' memory: that of this name, or a new one where there is none.
pub(super) fn memory(name: &str, prefix: &str, settings: &StoreSettings) -> Result<Client> {
    static NAMED: Mutex<BTreeMap<String, Arc<InMemory>>> = Mutex::new(BTreeMap::new());
    let handle = runtime::handle()?;
    let memory = match name {
        "" => Arc::default(),
        _ => {
            let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
            named.entry(name.to_owned()).or_default().clone()
        }
    };
    let stores = Stores {
        objects: memory.clone(),
        singly: memory.clone(),
        multipart: memory,
        pages: None,
        uploads: None,
        renewal: Renewal::new(),
    };
    let url = format!("memory:{name}/{prefix}");
    let url = url.trim_end_matches('/').to_owned();
    Ok(Client::new(url, prefix.to_owned(), None, stores, settings, handle))
}

fn s3(bucket: &str, settings: &StoreSettings, handle: &tokio::runtime::Handle) -> Result<Stores> {
    let variables = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
    let endpoint = settings.endpoint.clone().or_else(|| variable(&variables));
    let dial = Dial::new(settings, endpoint.as_deref(), "AWS_CA_BUNDLE")?;
    let (options, connector) = (dial.options(), Connector::new(bucket, &dial)?);
    let http = made_of(connector.connect(&options))?;
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_client_options(options)
        .with_http_connector(connector)
        .with_retry(no_retries())
        .with_checksum_algorithm(Checksum::CRC64NVME)
        // The checksum guards the bytes; a second pass for SHA-256 would cost more than all else.
        .with_unsigned_payload(true)
        .with_s3_express(bucket.ends_with("--x-s3"));
    if let Some(endpoint) = &endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &settings.region {
        builder = builder.with_region(region);
    }
    if let Some(path_style) = settings.path_style {
        builder = builder.with_virtual_hosted_style_request(!path_style);
    }
    if let Some(key) = &settings.sse_kms_key {
        builder = builder.with_sse_kms_encryption(key);
    }
    let renewal = Renewal::new();
    let builder = super::profile::with_credentials(builder, settings, handle, &renewal)?;
    let singly = made(builder.clone().with_disable_bulk_delete(true).build())?;
    let value = |key| builder.get_config_value(&key);
    let place = bucket_url(
        bucket,
        value(AmazonS3ConfigKey::Endpoint).as_deref(),
        &value(AmazonS3ConfigKey::Region).unwrap_or_else(|| REGION.to_owned()),
        value(AmazonS3ConfigKey::VirtualHostedStyleRequest).as_deref() == Some("true"),
    );
    let is_express = value(AmazonS3ConfigKey::S3Express).as_deref() == Some("true");
    let sign = value(AmazonS3ConfigKey::SkipSignature).as_deref() != Some("true");
    let region = value(AmazonS3ConfigKey::Region).unwrap_or_else(|| REGION.to_owned());
    let s3 = made(builder.build())?;
    // Express buckets are spoken to in sessions, which the crate keeps to itself.
    let uploads = place.filter(|_| !is_express);
    let uploads = uploads.map(|place| Uploads::new(http, &s3, place, region, sign));
    Ok(Stores { singly, uploads, renewal, ..of(s3) })
}

/// A bucket's own URL, as the crate makes it: with an endpoint and the bucket in the host name the endpoint has it
/// already.
fn bucket_url(bucket: &str, endpoint: Option<&str>, region: &str, in_host: bool) -> Option<Url> {
    let text = match endpoint.map(|endpoint| endpoint.trim_end_matches('/')) {
        Some(endpoint) if in_host => endpoint.to_owned(),
        Some(endpoint) => format!("{endpoint}/{bucket}"),
        None if in_host => format!("https://{bucket}.s3.{region}.amazonaws.com"),
        None => format!("https://s3.{region}.amazonaws.com/{bucket}"),
    };
    Url::parse(&text).ok()
}

fn gcs(bucket: &str, settings: &StoreSettings) -> Result<Stores> {
    let endpoint = settings.endpoint.clone().or_else(|| variable(&["STORAGE_EMULATOR_HOST"]));
    let dial = Dial::new(settings, endpoint.as_deref(), "SSL_CERT_FILE")?;
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(bucket)
        .with_client_options(dial.options())
        .with_http_connector(Connector::new(bucket, &dial)?)
        .with_retry(no_retries());
    if let Some(endpoint) = &endpoint {
        builder = builder.with_base_url(endpoint);
        // An emulator, which asks for no token; a proxy to the real one speaks TLS.
        if is_plain(endpoint) {
            // The crate's PUT asks for a token all the same.
            let none = StaticCredentialProvider::new(GcpCredential { bearer: String::new() });
            builder = builder.with_skip_signature(true).with_credentials(Arc::new(none));
        }
    }
    made(builder.build()).map(of)
}

fn azure(container: &str, settings: &StoreSettings) -> Result<Stores> {
    let endpoint = settings.endpoint.clone().or_else(|| variable(&["AZURE_STORAGE_ENDPOINT"]));
    let dial = Dial::new(settings, endpoint.as_deref(), "SSL_CERT_FILE")?;
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(container)
        .with_client_options(dial.options())
        .with_http_connector(Connector::new(container, &dial)?)
        .with_retry(no_retries());
    if let Some(endpoint) = endpoint {
        builder = builder.with_allow_http(is_plain(&endpoint)).with_endpoint(endpoint);
    }
    made(builder.build()).map(of)
}

/// One client for everything.
fn of<T>(built: Arc<T>) -> Stores
where
    T: object_store::ObjectStore + MultipartStore + PaginatedListStore,
{
    Stores {
        objects: built.clone(),
        singly: built.clone(),
        multipart: built.clone(),
        pages: Some(built),
        uploads: None,
        renewal: Renewal::new(),
    }
}

fn made<T>(built: object_store::Result<T>) -> Result<Arc<T>> {
    made_of(built).map(Arc::new)
}

fn made_of<T>(built: object_store::Result<T>) -> Result<T> {
    // Of a builder's errors only the kind is told: some quote values.
    built.map_err(|error| {
        let what = "cannot make a client of the store from the settings and variables";
        let error = Error::new(Code::Usage, what).hint(kind_of(&error));
        error.hint("see `StoreSettings` and the variables of the provider's own tools")
    })
}

/// A builder's error without values: its text up to the first quote or colon.
fn kind_of(error: &object_store::Error) -> String {
    use std::error::Error as _;
    let text = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let end = text.find(['"', '\'', ':', '`']).unwrap_or(text.len());
    text.get(..end).unwrap_or_default().trim().to_lowercase()
}

/// Retries are made above, where it is known what they mean.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}
