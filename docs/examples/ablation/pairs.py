"""Throwaway: what groups of features, labels and late decisions gain (CONFIG [EPOCHS OUT] FOLDER)."""
import sys, time, json, statistics
from dataclasses import replace
from pathlib import Path
import torch, warnings, re
warnings.filterwarnings("ignore")
from pipelines.config import load_config
from pipelines.data.recorded import load_traces
from pipelines.latency.stage import load_profile
from pipelines.compare.stage import all_profiles
from pipelines.compare.networks import IDEAL
from pipelines.compare.cells import of_verifier
from pipelines.evaluate.table import HERE
from pipelines.train.fitting import fitted, module_of
from pipelines.train.judging import timed_cases, statics, space_that_pays
from selector.train.tuning import replay_setting, tune_setting
from selector.train.replay import ratio_of_speeds
from selector.schema import PAIR
import mlflow
out=Path("pairs.jsonl")
config = load_config(Path(sys.argv[1]), ["train.epochs=8"])
names=PAIR.names
def match(*pats): return [n for n in names if any(re.fullmatch(p,n) for p in pats)]
G = {
 "match":   match("match","copied","match_steady","match_in_prompt"),
 "copied_mean": match("copied_mean_.*"),
 "after_match": match("after_match_predicted","after_match_copied_.*"),
 "second":  match("second_match","second_agrees","third_agrees"),
 "ngrams":  match("seen_[1-4]","agree_.*"),
 "new":     match("new_mean_.*"),
 "by_match":match("right_by_match","length_by_match"),
 "target": match("target_entropy_prev","target_entropy_mean_.*"),
 "target_after": match("after_match_entropy_.*","after_match_known"),
 "draft": match("draft_entropy_.*"),
 "accepted": match("accepted_mean.*","agreed"),
}
print("not in groups", [n for n in names if n not in sum(G.values(),[])], flush=True)
splits=load_traces(config); profile=load_profile(config); torch.set_num_threads(1)
ps=all_profiles(config, profile)
cache=Path("space.pt")
if cache.exists(): space=torch.load(cache,weights_only=False)
else:
    space=space_that_pays(config, splits["train"], [ps[HERE],ps[IDEAL]]); torch.save(space,cache)
print(len(space),"actions",len(space.survivals),"survivals", flush=True)
lab=of_verifier(splits, config.train.verifier, space)
print("profiles", list(ps), flush=True)
cases={}
for m in (HERE, IDEAL):
    tr=timed_cases(config, lab["train"], ps[m]); cases[m]=(statics(tr), timed_cases(config,lab["validation"],ps[m]), timed_cases(config,lab["test"],ps[m]))
def run(name, dropped):
    done=[json.loads(l)["name"] for l in out.read_text().splitlines()] if out.exists() else []
    if name in done: return
    t0=time.time(); masked=[n for g in dropped for n in G[g]]; res={}
    for seed in (0,):
        cfg=config.model_copy(update={"seed":seed})
        module=module_of(cfg,"regressor","light",lab["train"])
        module._body.unseen=[*module._body.unseen,*[PAIR.index(n) for n in masked]]
        with mlflow.start_run(run_name=name) as r:
            module=fitted(cfg,module,lab,cfg.train.verifier,[],Path(f"{sys.argv[-1]}/{name}-{seed}"),r.info.run_id)
        for m,(bases,val,test) in cases.items():
            rs=[];es=[]
            for b,v,t in zip(bases,val,test):
                for levels,level in module.ways:
                    j=tune_setting(v,{l:module.scores(v.texts,l) for l in levels},replace(b,level=level))
                    rep=replay_setting(t,{l:module.scores(t.texts,l) for l in levels},j.setting)
                    st=replay_setting(t,{},b)
                    x=ratio_of_speeds(rep,st,t.texts.source_number_X); rs.append(x.value); es.append(x.error)
            res[m]=(statistics.fmean(rs), statistics.fmean(es), [round(x,3) for x in rs])
    with out.open("a") as f: f.write(json.dumps({"name":name,"dropped":dropped,"res":res,"s":time.time()-t0})+"\n")
    print(name,{m:(round(v[0],4),round(v[1],4),v[2]) for m,v in res.items()},f"{time.time()-t0:.0f}s",flush=True)
def only(keep): 
    keep=keep.split(); run("only "+" ".join(keep),[g for g in G if g not in keep])
run("all",[])
only("match copied_mean second target draft accepted")
run("without new by_match",["new","by_match"])
run("without new by_match after_match ngrams",["new","by_match","after_match","ngrams"])
only("match copied_mean second draft accepted")
only("match copied_mean second target accepted")
only("match copied_mean second target draft")
run("without target_after",["target_after"])
run("without target target_after",["target","target_after"])
run("without draft",["draft"])
run("without accepted",["accepted"])
run("C without new by_match ngrams",["new","by_match","ngrams"])
run("C without target_after",["new","by_match","ngrams","target_after"])
only("match second target draft accepted")
only("match after_match second target draft accepted")
only("match copied_mean after_match second draft")
only("match copied_mean after_match second draft accepted")
only("match copied_mean after_match second accepted")
only("match copied_mean after_match second")
