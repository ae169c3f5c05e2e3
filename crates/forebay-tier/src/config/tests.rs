//! Configurations as people write them: read, overridden, misspelled.

use super::*;

const GOOD: &str = r#"
[[tier]]
name = "local"
place = "/nvme/run7"
capacity = "2 TB"
keep_last = 2
keep_within = "1 d"

[[tier]]
name = "shared"
place = "runs/7"
keep_every = 1_000
write_limit = "100 MB/s"

[[tier]]
name = "bucket"
place = "s3://archive/run7"
takes = "every 1000"
[tier.store]
endpoint = "http://user:hunter2@127.0.0.1:9000"
path_style = true
part_bytes = "16 MiB"

[tiers]
backlog = "straight"
audit_log = "audit.log"
look_every = 1
io_priority = "idle"

[agent]
listen = "0.0.0.0:9090"
token_file = "token"
"#;

fn read(text: &str) -> Result<Config> {
    read_with(text, &[], &[])
}

fn read_with(text: &str, variables: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Config> {
    let owned = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let beside = Beside { variables: owned(variables), flags: owned(flags) };
    Config::from_text(text, Path::new("/etc/x/forebay.toml"), &beside)
}

fn from(config: &Config, key: &str) -> (serde_json::Value, String) {
    let setting = config.settings.iter().find(|setting| setting.key == key).unwrap();
    (setting.value.clone(), setting.from.to_string())
}

#[test]
fn drives_of_nodes_have_their_records_elsewhere() {
    let tier = |name: &str, place: &str, more: &str| {
        format!("[[tier]]\nname = \"{name}\"\nplace = \"{place}\"\n{more}")
    };
    let records = "records = \"s3://archive/run7\"\n";
    let config = read(&(tier("a", "/nvme/run7", records) + &tier("b", "shared", ""))).unwrap();
    assert_eq!(config.tiers[0].url(), "node://s3%3A%2F%2Farchive%2Frun7/nvme/run7");
    assert_eq!(config.tiers[1].url(), "/etc/x/shared");
    for bad in [
        tier("a", "/nvme/run7", "") + &tier("b", "/shared", records),
        tier("a", "s3://b/run7", records),
        tier("a", "/nvme/run7", records) + &tier("b", "/shared", "takes = \"every 2\"\n"),
    ] {
        let error = read(&bad).unwrap_err();
        assert!(error.code() == Code::Usage && error.what().contains("records"), "{error}");
    }
}

#[test]
fn a_configuration_is_read_and_says_where_each_value_came_from() {
    let config = read(GOOD).unwrap();
    let [local, shared, bucket] = &config.tiers[..] else { panic!("{config:?}") };
    assert_eq!(local.capacity, Some(2_000_000_000_000));
    assert_eq!(local.keep_within, Some(Duration::from_secs(86_400)));
    assert_eq!((local.keep_last, local.keep_every), (Some(2), None));
    assert_eq!(shared.place, "/etc/x/runs/7", "paths count from the file's folder");
    assert_eq!(shared.write_limit, NonZeroU64::new(100_000_000));
    assert_eq!(shared.keep_every, NonZeroU64::new(1000));
    assert_eq!(bucket.place, "s3://archive/run7");
    assert_eq!(bucket.takes, Takes::Every(NonZeroU64::new(1000).unwrap()));
    assert_eq!(bucket.store.part_bytes, 16 << 20);
    assert_eq!(bucket.store.path_style, Some(true));
    assert_eq!(bucket.store.retries, StoreSettings::default().retries);
    assert_eq!(config.moving.backlog, Backlog::Straight);
    assert_eq!(config.moving.audit_log.as_deref(), Some(Path::new("/etc/x/audit.log")));
    assert_eq!(config.moving.io_priority, IoPriority::Idle);
    assert_eq!(config.agent.listen.as_deref(), Some("0.0.0.0:9090"));

    let capacity = from(&config, "tier.local.capacity");
    assert_eq!(capacity, (2_000_000_000_000u64.into(), "/etc/x/forebay.toml:5".to_owned()));
    let look = from(&config, "tiers.look_every");
    assert_eq!(look, (1.0.into(), "/etc/x/forebay.toml:27".to_owned()));
    assert_eq!(from(&config, "tiers.files_at_once"), (4.into(), "default".to_owned()));
    let shown = serde_json::to_string(&config.settings).unwrap();
    assert!(!shown.contains("hunter2") && shown.contains("***@127.0.0.1"));
}

#[test]
fn variables_go_before_the_file_and_flags_before_both() {
    let variables = [
        ("FOREBAY_TIER_LOCAL_CAPACITY", "1 TB"),
        ("FOREBAY_TIERS_LOOK_EVERY", "5 s"),
        ("FOREBAY_TIER_BUCKET_STORE_REGION", "eu-central-1"),
        ("FOREBAY_DEVICE", "host"),
    ];
    let config = read_with(GOOD, &variables, &[("tiers.look_every", "7 s")]).unwrap();
    assert_eq!(config.tiers[0].capacity, Some(1_000_000_000_000));
    assert_eq!(config.moving.look_every, Duration::from_secs(7));
    assert_eq!(config.tiers[2].store.region.as_deref(), Some("eu-central-1"));
    let of = |key| from(&config, key).1;
    assert_eq!(of("tier.local.capacity"), "FOREBAY_TIER_LOCAL_CAPACITY");
    assert_eq!(of("tiers.look_every"), "command line");
}

#[test]
fn errors_name_file_line_key_and_what_was_meant() {
    let cases = [
        ("[[tier]]\nname = \"a\"\nplace = \"/a\"\ncapcity = 1\n", 4, "capcity", "`capacity`"),
        ("[tiers]\nbacklog = \"wiat\"\n", 2, "tiers.backlog", ""),
        ("\n[tiers]\nlook_evry = \"2 s\"\n", 3, "look_evry", "`look_every`"),
        ("[agnet]\n", 1, "agnet", "`agent`"),
        ("[tier]\nname = \"a\"\n", 1, "[[tier]]", ""),
        ("[[tier]]\nname = \"a\"\nplace = \"/a\"\nkeep_last = 0\n", 4, "keep_last", ""),
        ("[[tier]]\nname = \"a\"\nplace = \"/a\"\ncapacity = [1]\n", 4, "a list", ""),
        ("[[tier]]\nname = \"a\"\nplace = \"/a\"\n[tier.store]\nregoin = 1\n", 5, "regoin", ""),
        ("[[tier]]\nplace = \"/a\"\n", 1, "`name`", ""),
        ("[[tier]]\nname = \"a\"\n", 1, "`place`", ""),
        ("[[tier]]\nname = \"a b\"\nplace = \"/a\"\n", 1, "letters", ""),
        ("[tiers]\nbacklog = \n", 2, "TOML", ""),
        ("[tiers]\ngrace = 1\ngrace = 2\n", 3, "TOML", ""),
    ];
    for (text, line, key, meant) in cases {
        let error = read(text).unwrap_err();
        assert_eq!(error.code(), Code::Usage, "{text}");
        let shown = error.render();
        assert!(shown.contains(&format!("/etc/x/forebay.toml:{line}")), "{text}: {shown}");
        assert!(shown.contains(key) && shown.contains(meant), "{text}: {shown}");
    }
    let twice = "[[tier]]\nname = \"a\"\nplace = \"/a\"\n[[tier]]\nname = \"A\"\nplace = \"/b\"\n";
    assert!(read(twice).unwrap_err().what().contains("two tiers"));
}

#[test]
fn variables_and_flags_that_stand_for_no_key_are_errors() {
    let error = read_with(GOOD, &[("FOREBAY_TIERS_LOOK_EVRY", "1")], &[]).unwrap_err();
    assert!(error.render().contains("`FOREBAY_TIERS_LOOK_EVERY`"), "{}", error.render());
    let error = read_with(GOOD, &[("FOREBAY_TIER_LOKAL_CAPACITY", "1")], &[]).unwrap_err();
    assert!(error.render().contains("`FOREBAY_TIER_LOCAL_CAPACITY`"), "{}", error.render());
    let error = read_with(GOOD, &[], &[("tier.local.capacty", "1")]).unwrap_err();
    assert!(error.render().contains("`tier.local.capacity`"));
    let error = read_with(GOOD, &[("FOREBAY_TIERS_GRACE", "soon")], &[]).unwrap_err();
    assert_eq!(error.place(), Some("variable FOREBAY_TIERS_GRACE"));
    assert!(Beside::of_process(["nonsense"]).is_err());
}

#[test]
fn without_a_file_there_are_no_tiers_and_a_named_one_must_be_there() {
    let config = read("").unwrap();
    assert!(config.tiers.is_empty() && config.moving == Moving::default());
    let named = Config::load(Some(Path::new("/not/there.toml")), &Beside::default());
    assert_eq!(named.unwrap_err().code(), Code::NotFound);
    assert!(read(GOOD).unwrap().tier("lokal").unwrap_err().render().contains("`local`"));
}

#[test]
fn copies_are_for_the_first_tier() {
    let tier = |name: &str, more: &str| {
        format!("[[tier]]\nname = \"{name}\"\nplace = \"/x/{name}\"\n{more}\n")
    };
    let read = |text: &str| Config::from_text(text, Path::new("/x/f.toml"), &Beside::default());
    let keys = "copies = 2\ncopies_jump = 8\ncopies_gone = \"30 s\"";
    let agent = "[agent]\npeer_token_file = \"peer\"\npeer_url = \"https://n1:1\"\n";
    let config = read(&(tier("a", keys) + &tier("b", "") + agent)).unwrap();
    let (first, second) = (&config.tiers[0], &config.tiers[1]);
    assert_eq!((first.copies, first.copies_jump), (2, 8));
    assert_eq!(first.copies_gone, std::time::Duration::from_secs(30));
    assert_eq!((second.copies, second.copies_jump), (0, 1));
    assert_eq!(config.agent.peer_token_file.as_deref(), Some(Path::new("/x/peer")));
    let error = read(&(tier("a", "") + &tier("b", "copies = 1"))).unwrap_err();
    assert!(error.code() == Code::Usage && error.what().contains("not the first"), "{error}");
    assert!(
        read(&tier("a", "copies = 9")).is_err() && read(&tier("a", "copies_jump = 0")).is_err()
    );
}

#[test]
fn places_that_no_store_is_known_for_are_refused_where_they_are_said() {
    let text = |place: &str| format!("[[tier]]\nname = \"a\"\nplace = \"{place}\"\n");
    let read = |text: &str, flags: &[(&str, &str)]| {
        let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let beside = Beside { flags: flags.collect(), ..Beside::default() };
        Config::from_text(text, Path::new("/etc/x/forebay.toml"), &beside)
    };
    for good in ["s3://bkt/x", "gs://bkt", "az://c/x", "file:///a", "memory:", "run:7", "a/b"] {
        assert!(read(&text(good), &[]).is_ok(), "{good}");
    }
    let error = read(&text("s4://bkt"), &[]).unwrap_err();
    let told = error.render();
    assert_eq!(error.code(), Code::Usage);
    for says in ["`place`", "`s4:`", "/etc/x/forebay.toml:3, tier.a.place", "s3:"] {
        assert!(told.contains(says), "{told}");
    }
    let told = read(&text("a"), &[("tier.a.place", "s4://bkt")]).unwrap_err().render();
    assert!(told.contains("command line"), "{told}");
    let records = text("/a").replace("place", "records = \"http://x/y\"\nplace");
    assert!(read(&records, &[]).unwrap_err().render().contains("`records`"));
    let told = read(&text("s3://me:hunter2@bkt/x"), &[]).unwrap_err().render();
    assert!(!told.contains("hunter2") && told.contains("password"), "{told}");
}
