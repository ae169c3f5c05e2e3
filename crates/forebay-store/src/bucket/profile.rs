//! Credentials and region of the AWS configuration files: profiles, SSO, assumed roles, credential processes.
//!
//! The `object_store` crate knows variables, web identity, containers and instances, and no files. With the feature
//! `aws-profiles` the AWS SDK's own chain is asked instead: variables, files, web identity, containers, instances, in
//! that order. What it gives is kept until shortly before it expires, or until the store refuses it
//! ([`renewal`](super::renewal)): then files are read again.

use forebay_error::Result;
use object_store::aws::AmazonS3Builder;
use tokio::runtime::Handle;

use super::renewal::Renewal;
use super::settings::StoreSettings;

#[cfg(feature = "aws-profiles")]
pub(super) use chain::with_credentials;

/// A profile is an error without the feature; all else is the builder's.
#[cfg(not(feature = "aws-profiles"))]
pub(super) fn with_credentials(
    builder: AmazonS3Builder,
    settings: &StoreSettings,
    _handle: &Handle,
    _renewal: &Renewal,
) -> Result<AmazonS3Builder> {
    use forebay_error::{Code, Error};
    match &settings.profile {
        None => Ok(builder),
        Some(_) => {
            let what = "profiles are not read: this was built without the feature `aws-profiles`";
            let hint =
                "export the profile's credentials as variables: `aws configure export-credentials`";
            Err(Error::new(Code::Unsupported, what).hint(hint))
        }
    }
}

#[cfg(feature = "aws-profiles")]
mod chain {
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    use async_trait::async_trait;
    use aws_config::provider_config::ProviderConfig;
    use aws_config::{BehaviorVersion, Region, SdkConfig};
    use aws_credential_types::provider::ProvideCredentials;
    use aws_smithy_http_client::tls;
    use object_store::CredentialProvider;
    use object_store::aws::AwsCredential;
    use tokio::sync::Mutex;

    use super::*;
    use crate::bucket::runtime::wait;

    /// Credentials are asked for anew so long before they expire.
    const MARGIN: Duration = Duration::from_secs(300);

    /// Takes the chain's credentials, unless the variables hold some and no profile is named.
    pub(in crate::bucket) fn with_credentials(
        builder: AmazonS3Builder,
        settings: &StoreSettings,
        handle: &Handle,
        renewal: &Renewal,
    ) -> Result<AmazonS3Builder> {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if settings.profile.is_none() && set("AWS_ACCESS_KEY_ID") {
            return Ok(builder);
        }
        let config = wait(handle, load(settings));
        let region = config.region().map(ToString::to_string);
        let builder = match region.filter(|_| settings.region.is_none()) {
            Some(region) => builder.with_region(region),
            None => builder,
        };
        renewal.listen();
        let kept = Mutex::new(Kept { config: Some(config), credential: None });
        let (settings, renewal) = (settings.clone(), renewal.clone());
        Ok(builder.with_credentials(Arc::new(Chain { settings, renewal, kept })))
    }

    async fn load(settings: &StoreSettings) -> SdkConfig {
        let client = aws_smithy_http_client::Builder::new()
            .tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring))
            .build_https();
        let mut loader =
            aws_config::defaults(BehaviorVersion::latest()).http_client(client.clone());
        if let Some(profile) = &settings.profile {
            // Named goes before variables.
            let variables = ["AWS_REGION", "AWS_DEFAULT_REGION"];
            let set = || variables.iter().find_map(|name| std::env::var(name).ok());
            let region = settings.region.clone().or_else(set).map(Region::new);
            let how = ProviderConfig::default().with_http_client(client).with_region(region);
            let named = aws_config::profile::ProfileFileCredentialsProvider::builder()
                .configure(&how)
                .profile_name(profile)
                .build();
            loader = loader.profile_name(profile).credentials_provider(named);
        }
        loader.load().await
    }

    struct Chain {
        settings: StoreSettings,
        renewal: Renewal,
        kept: Mutex<Kept>,
    }

    struct Kept {
        /// It remembers what it read of the files, so it is good for one time; `None`: to be loaded anew.
        config: Option<SdkConfig>,
        credential: Option<(Arc<AwsCredential>, Option<SystemTime>)>,
    }

    impl std::fmt::Debug for Chain {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("credentials of the AWS chain")
        }
    }

    #[async_trait]
    impl CredentialProvider for Chain {
        type Credential = AwsCredential;

        async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
            let mut kept = self.kept.lock().await;
            if let Some((credential, expires)) = kept.credential.as_ref()
                && !self.renewal.is_wanted()
                && expires.is_none_or(|expires| SystemTime::now() + MARGIN < expires)
            {
                return Ok(Arc::clone(credential));
            }
            let refuse = |what: String| object_store::Error::Unauthenticated {
                path: "credentials".to_owned(),
                source: what.into(),
            };
            let config = match kept.config.take() {
                Some(config) => config,
                None => load(&self.settings).await,
            };
            let provider = config.credentials_provider();
            let provider = provider.ok_or_else(|| refuse("no credentials".to_owned()))?;
            let found = provider.provide_credentials().await;
            let found = found.map_err(|error| refuse(error.to_string()))?;
            let credential = Arc::new(AwsCredential {
                key_id: found.access_key_id().to_owned(),
                secret_key: found.secret_access_key().to_owned(),
                token: found.session_token().map(str::to_owned),
            });
            kept.credential = Some((Arc::clone(&credential), found.expiry()));
            Ok(credential)
        }
    }
}
