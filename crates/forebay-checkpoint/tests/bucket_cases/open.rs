//! What is in a bucket, opened where it is: ranges alone, checked; models of safetensors; damage, absence. **unsafe**:
//! memory is given by address.

use std::sync::Mutex;

use forebay_checkpoint::open::{Place, folder_in, open_model};
use forebay_checkpoint::restore::Reader;
use forebay_device::Device;
use forebay_engine::{Engine, EngineConfig, LoadOptions, Selection, sources_of};
use forebay_format::Model;
use forebay_store::{StoreSettings, shared_store};
use servers::proxy::Action;

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// Requests that went through a proxy: method, path, and the bytes that a range asked for.
type Log = Arc<Mutex<Vec<(String, String, u64)>>>;

/// The server, with a log of what it is asked.
fn logged(server: &Reached) -> (SocketAddr, Log) {
    let log = Log::default();
    let own = log.clone();
    let address = servers::proxy::start(server.in_turn, move |request| {
        let range = request.head.lines().find_map(|line| {
            let line = line.to_ascii_lowercase();
            let (from, to) = line.strip_prefix("range: bytes=")?.trim().split_once('-')?;
            Some(to.parse::<u64>().ok()? + 1 - from.parse::<u64>().ok()?)
        });
        let line = (request.method.to_owned(), request.path.to_owned(), range.unwrap_or(0));
        own.lock().unwrap().push(line);
        Action::Pass
    });
    (address, log)
}

fn load(model: &Model) -> Result<Vec<Vec<u8>>> {
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let selection = Selection::all(&model.catalog)?;
    let (_, plan) = selection.plan(engine.config().piece_bytes)?;
    let mut memory: Vec<Vec<u8>> =
        plan.target_bytes().iter().map(|&bytes| vec![0; bytes as usize]).collect();
    let addresses: Vec<u64> = memory.iter_mut().map(|one| one.as_mut_ptr() as u64).collect();
    let session = engine.start(plan, sources_of(&model.files)?, LoadOptions::default())?;
    // SAFETY: each target has memory of its own, which lives until the session has ended.
    unsafe { session.provide(&addresses, None, None)? };
    assert!(session.wait(LONG)?);
    let report = session.finish()?;
    assert_eq!(report.files_unchanged, model.files.len());
    Ok(memory)
}

fn load_region(reader: &Reader, name: &str, region: Region) -> Result<Vec<u8>> {
    let number = reader.items().iter().position(|item| item.name == name).unwrap();
    let selected = reader.select(&[(number, region)])?;
    load_selected(&selected)
}

fn load_selected(selected: &forebay_checkpoint::restore::Selected) -> Result<Vec<u8>> {
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let (_, plan) = selected.plan(engine.config().piece_bytes)?;
    let mut memory = vec![0; plan.target_bytes()[0] as usize];
    let sources = sources_of(&selected.model.files)?;
    let session = engine.start(plan, sources, LoadOptions::default())?;
    // SAFETY: the memory lives until the session has ended.
    unsafe { session.provide(&[memory.as_mut_ptr() as u64], None, None)? };
    assert!(session.wait(LONG)?);
    session.finish()?;
    Ok(memory)
}

#[test]
fn a_region_is_read_from_the_bucket_alone_and_checked() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    save_all(&url, server.in_turn, 2, 1, 5).into_iter().for_each(|saved| saved.unwrap());
    let (address, log) = logged(server);
    let store = root(&url, address).store;
    let reader = Reader::open(folder_in(store, "step-7/")).unwrap();
    let opened = std::mem::take(&mut *log.lock().unwrap()).len();
    assert!(opened <= 8, "{opened} requests to open it");
    // 100 rows of the second rank's half: two blocks of a mebibyte at the most.
    let rows = Region { offsets: vec![1600, 0], sizes: vec![100, SHAPE[1]] };
    let found = load_region(&reader, "model.large", rows).unwrap();
    let row = SHAPE[1] as usize * 4;
    assert!(found == large_of(2, 5)[1600 * row..1700 * row]);
    let log = log.lock().unwrap();
    let data: Vec<_> = log.iter().filter(|line| line.1.contains("distcp")).collect();
    let bytes: u64 = data.iter().map(|line| line.2).sum();
    assert!((600_000..=2 << 20).contains(&bytes), "{bytes} bytes were asked for: {data:?}");
    assert!(data.iter().all(|line| line.1.contains("_1_")), "the other rank's file: {data:?}");
    assert!(log.len() < 10, "{log:?}");
}

#[test]
fn every_byte_of_a_bucket_is_verified_and_damage_is_named() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    save_all(&url, server.in_turn, 2, 1, 5).into_iter().for_each(|saved| saved.unwrap());
    let store = root(&url, server.in_turn).store;
    let folder = folder_in(store.clone(), "step-7/");
    let found = verify_folder(&folder, &Unwatched).unwrap();
    assert!(found.is_sound() && found.values == (1, 2), "{:?}", found.faults);
    let whole = load(&open_model(&folder).unwrap().resolve_all().unwrap()).unwrap();
    assert!(whole.concat() == large_of(2, 5));

    let names = store.names("step-7/", 100).unwrap().into_iter().map(|(name, _)| name);
    let name = names.into_iter().find(|name| name.ends_with("_1_0.distcp")).unwrap();
    let key = format!("step-7/{name}");
    let (mut bytes, _) = store.get(&key, 1 << 30).unwrap().unwrap();
    bytes[5 << 20] ^= 4;
    store.put(&key, &bytes).unwrap();
    let found = verify_folder(&folder, &Unwatched).unwrap();
    assert_eq!(found.faults[0].file, name);
    assert_eq!(found.faults[0].name.as_deref(), Some("model.large"));
    let model = open_model(&folder).unwrap().resolve_all().unwrap();
    assert_eq!(load(&model).unwrap_err().code(), Code::Checksum);

    store.put(&key, &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(load(&model).unwrap_err().code(), Code::FileChanged, "opened before");
    let reader = Reader::open(&folder).unwrap();
    let last = Region { offsets: vec![SHAPE[0] - 1, 0], sizes: vec![1, SHAPE[1]] };
    let error = load_region(&reader, "model.large", last).unwrap_err();
    assert_eq!(error.code(), Code::Truncated, "{error:?}");
    store.remove(&key).unwrap();
    let codes: Vec<Code> =
        verify_folder(&folder, &Unwatched).unwrap().faults.iter().map(|f| f.error.code()).collect();
    assert_eq!(codes, [Code::MissingFile]);
    store.remove("step-7/.metadata").unwrap();
    assert_eq!(Checkpoint::open(&folder).unwrap_err().code(), Code::NotCommitted);
    let nowhere = folder_in(store, "step-8/");
    assert_eq!(Checkpoint::open(&nowhere).unwrap_err().code(), Code::NotFound);
}

/// A safetensors file of one tensor of bytes.
fn safetensors(name: &str, bytes: &[u8]) -> Vec<u8> {
    let len = bytes.len();
    let header =
        format!(r#"{{"{name}":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), bytes].concat()
}

#[test]
fn models_of_safetensors_are_loaded_from_a_bucket() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    let settings = servers::settings(server.in_turn);
    let store = shared_store(&url, &settings).unwrap();
    let (first, second) = (bytes(1, 9_000_001), bytes(2, 30));
    store.put("m/model-00001-of-00002.safetensors", &safetensors("a", &first)).unwrap();
    store.put("m/model-00002-of-00002.safetensors", &safetensors("b", &second)).unwrap();
    let index = r#"{"weight_map":{"a":"model-00001-of-00002.safetensors",
        "b":"model-00002-of-00002.safetensors"}}"#;
    let place = |path: &str| Place::parse(Path::new(&format!("{url}/{path}")), &settings).unwrap();
    let open = |path: &str| open_model(place(path)).and_then(|opened| opened.resolve_all());
    for (path, wanted) in [
        ("m", vec![first.clone(), second.clone()]),
        ("m/", vec![first.clone(), second.clone()]),
        ("m/model-00002-of-00002.safetensors", vec![second.clone()]),
    ] {
        assert!(load(&open(path).unwrap()).unwrap() == wanted, "{path}");
    }
    store.put("m/model.safetensors.index.json", index.as_bytes()).unwrap();
    for path in ["m", "m/model.safetensors.index.json"] {
        let model = open(path).unwrap();
        assert!(load(&model).unwrap() == [first.clone(), second.clone()], "{path}");
        assert!(model.catalog.files[0].path.to_str().unwrap().starts_with("s3://"));
    }
    store.remove("m/model-00002-of-00002.safetensors").unwrap();
    assert_eq!(open("m").unwrap_err().code(), Code::MissingShard);
    assert_eq!(open("m/x.safetensors").unwrap_err().code(), Code::NotFound);
    assert_eq!(open("nothing").unwrap_err().code(), Code::NotFound);
    store.put("bad/model.safetensors", &[255; 64]).unwrap();
    let error = open("bad").unwrap_err();
    assert_eq!(error.code().category(), forebay_error::Category::Data, "{error:?}");
}

/// Tensors and rows that lie near each other come by one request, far rows by several at once.
#[test]
fn slices_of_inner_dimensions_are_few_requests() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    save_all(&url, server.in_turn, 1, 1, 5).into_iter().for_each(|saved| saved.unwrap());
    let (address, log) = logged(server);
    let reader = Reader::open(folder_in(root(&url, address).store, "step-7/")).unwrap();
    log.lock().unwrap().clear();
    // 40 columns of 3000 rows of 6 kB.
    let columns = Region { offsets: vec![0, 700], sizes: vec![SHAPE[0], 40] };
    let found = load_region(&reader, "model.large", columns).unwrap();
    let row = SHAPE[1] as usize * 4;
    let whole = large_of(1, 5);
    let wanted: Vec<u8> =
        whole.chunks(row).flat_map(|row| row[700 * 4..740 * 4].to_vec()).collect();
    assert!(found == wanted);
    let requests = log.lock().unwrap().len();
    assert!(requests < 16, "{requests}");
}

#[test]
fn no_secret_is_in_what_is_said() {
    let settings = StoreSettings {
        endpoint: Some("http://127.0.0.1:1".to_owned()),
        retries: 0,
        ..servers::settings("127.0.0.1:1".parse().unwrap())
    };
    let place = Place::parse(Path::new("s3://bucket/a"), &settings).unwrap();
    let error = open_model(&place).unwrap_err();
    let said = format!("{error:?} {} {place:?}", error.render());
    assert!(!said.contains(servers::SECRET) && !said.contains(servers::KEY), "{said}");
    let secret = Path::new("s3://user:hunter2@bucket/a");
    let said = format!("{:?}", Place::parse(secret, &settings).unwrap_err());
    assert!(!said.contains("hunter2"), "{said}");
}
